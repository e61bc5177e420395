"""What a wheel is: names, index pages, RECORD, the zip directory. Pure."""

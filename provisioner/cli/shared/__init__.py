"""What commands share: the surroundings, options, tables and output."""

"""A drift report in each of its forms. Pure: report in, text out."""

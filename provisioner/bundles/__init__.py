"""One file for hosts without a network: made, checked, used."""

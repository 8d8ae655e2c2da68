"""What two nodes must compute alike. Pure: no I/O, no clock, no environment variable, no ambient randomness."""

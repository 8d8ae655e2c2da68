"""Studies of how weights change under small learning rates, as in PULSE, section 3 and appendices A and G."""

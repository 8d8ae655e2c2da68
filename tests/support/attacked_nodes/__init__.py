"""A node that a test attacks (a follower, a trainer or a validator), its store, its clock and other participants."""

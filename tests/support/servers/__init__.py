"""Real HTTP and S3 servers on loopback."""

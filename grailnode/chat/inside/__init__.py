"""What runs in the process that renders templates."""

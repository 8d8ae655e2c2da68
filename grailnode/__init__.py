"""The program: everything that touches the world."""

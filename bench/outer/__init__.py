"""How sites that train together learn, what they send, and what one poisoned site can do (docs/benchmarks)."""

"""Golden vectors of docs/spec/pseudogradient.md."""

"""How several sites train one policy (docs/spec/outer-round.md): records, checks, arithmetic. No I/O."""

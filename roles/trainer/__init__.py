"""The trainer: three processes (learn, publish, collect) that share the spool and never import each other."""

"""A trainer's three processes (learn, publish, collect) and the spool between them. Its rooms never import each other."""

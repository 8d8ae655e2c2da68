"""Reading objects over plain HTTPS from addresses that strangers name. Imports protocol and roles.ports."""

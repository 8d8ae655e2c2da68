"""Identity in a run: signatures, announcements, authority and admission. Imports only flat modules of protocol."""

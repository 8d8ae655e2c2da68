"""Who speaks and who may: signatures, announcements, authority and admission. Imports only flat modules of protocol."""

"""`penstock serve`: a trained policy decides for games, over TCP, WebSocket and HTTP."""

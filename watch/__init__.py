"""`penstock watch`: a web page that shows runs, living and ended. Reads their files and sockets."""

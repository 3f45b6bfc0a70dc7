"""What starts processes and watches over them, and the commands a user types."""

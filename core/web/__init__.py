"""What the web servers of Penstock share: the address, who is answered, and which connections stay.

Read `listen` first.
"""

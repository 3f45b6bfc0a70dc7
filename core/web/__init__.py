"""What web servers share: the address, who is answered, which connections stay, the page's files.

Read `listen` first.
"""

"""Many nodes, one address: the pure part. Nothing here reads a clock or a socket.

names        what an id says of where its work is
placement    which node a new model goes to
members      who is there, and who has fallen silent
hops         what one node signs when it hands a request to another
"""

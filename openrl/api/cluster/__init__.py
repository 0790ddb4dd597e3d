"""A node among others: what is another's is handed on, once.

addressing    what a request is about
peers         asks the others how they are
locating      which node a request belongs to
forwarding    hands a request on, streams the answer back; what is said for a node that is away
merging       lists of all nodes
consultation  what nodes ask each other
routing       the middlewares that put these together
"""

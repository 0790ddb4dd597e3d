"""The async client: the Tinker routes over msgpack, numpy in and out.

client      a session: create models, open samplers, heartbeats
model       one training run: ordered, pipelined operations
sampler     one frozen set of weights to sample from
address     what is wrong with an address or a key, before anything is sent
pending     an accepted request whose result is still to come
many        many answers at once
blocking    the same without async
waiting     what is being waited for, for a progress display
transport   HTTP: retries with the same identity, long polls
compression whether bodies are compressed on their way
codec       msgpack bodies and the values in them
failures    typed errors from answers
"""

from openrl.client.client import Client, connect
from openrl.client.model import Model
from openrl.client.pending import Pending
from openrl.client.sampler import Sampler
from openrl.client.waiting import Wait

__all__ = ["Client", "Model", "Pending", "Sampler", "Wait", "connect"]

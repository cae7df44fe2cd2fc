"""The letters and the tensor types, said once.

b  batch: sequences side by side        h  heads
t  time: places of a sequence           s  time again, where weights run over the past
m  d_model: the width between blocks    c  channels of a convolution, or of a token
k  d_key: width of one key or query     v  d_value: width of one value

Axes always stand in the order b h t d (d being k or v); an effective attention is b h t s.
"""

from jaxtyping import Float
from torch import Tensor

Hidden = Float[Tensor, "b t m"]
Query = Float[Tensor, "b h t k"]
Value = Float[Tensor, "b h t v"]
Attention = Float[Tensor, "b h t s"]
Gates = dict[str, Tensor]
"""What a mechanism draws from its input besides q, k and v; every tensor has time on axis 2 (b h t …)."""
State = dict[str, Tensor]
"""All that a mixer carries from one token to the next; every tensor has the batch on axis 0."""

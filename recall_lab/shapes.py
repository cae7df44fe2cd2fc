"""The letters of tensor axes, and the tensor types they make up.

b  batch: sequences                     h  heads
t  time: positions of a sequence        s  time again, where weights run over past positions
m  d_model: the width between blocks    c  channels of a convolution, or of a token
k  d_key: width of a key or query       v  d_value: width of a value

Axes are always in the order b h t d, d being k or v. An effective attention is b h t s.
"""

from jaxtyping import Float
from torch import Tensor

Hidden = Float[Tensor, "b t m"]
Query = Float[Tensor, "b h t k"]
Value = Float[Tensor, "b h t v"]
Attention = Float[Tensor, "b h t s"]
Gates = dict[str, Tensor]
"""What a mechanism computes from its input besides q, k and v. Every tensor has time on axis 2 (b h t …)."""
State = dict[str, Tensor]
"""All that a mixer carries from one token to the next. Every tensor has the batch on axis 0."""

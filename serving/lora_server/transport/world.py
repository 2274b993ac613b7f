"""World of processes whose devices have symmetric memory (NVSHMEM). No jax.

A world is fixed when it begins: its members, their numbers (PEs), and its id, which PE 0 makes. All
members join it with the id before one of them exchanges anything.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class World:
    """One world: `ranks` of the LoRA Server, PEs from 0 on, then `instances` of one device each."""

    id: bytes = dataclasses.field(repr=False)
    ranks: int
    instances: int
    one_host: bool  # of all members

    @property
    def size(self) -> int:
        """Number of PEs."""
        return self.ranks + self.instances

    def pe_of_instance(self, number: int) -> int:
        """Return the PE of an instance; that of a rank is the rank's number."""
        return self.ranks + number

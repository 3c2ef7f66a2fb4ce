"""One real module per rank, made once.

Unlike the drop-in's twins, which are made anew in every forward, these have parameters of their own, as
``nn.Parameter``: hooks, ``parameters()`` and ``module.compile()`` work in them.  Rank 0 runs the user's own module.
Ranks of one device share the memory of the values, never the leaf: each has its own gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import attrgetter
from types import MethodType

from torch.nn import Module, Parameter

from mgpu_core.comm import dispatch as collectives
from mgpu_core.device.compiled import compiled_calls
from mgpu_core.device.team import Team
from mgpu_core.device.tensor_checks import memory_of, memory_questions, moved_between
from mgpu_core.look import Look
from mgpu_core.module_tree import ModuleTree, check_initialised, named_parameters_of, parameters_of
from mgpu_core.optim.flat_buffers import FlatTensors, compact
from mgpu_core.train.attributes import AttributeWatch
from mgpu_core.train.net_watch import ADVICE, NetWatch, first_difference
from mgpu_core.train.rank_buffers import RankBuffers
from mgpu_core.train.rollback import BufferSnapshot
from mgpu_core.train.twins import Twin, refuse_hooks

__all__ = ["Replicas"]

_version_of = attrgetter("_version")


class Replicas:
    """The module of each rank.

    Args:
        net: the user's module, on the first device; rank 0's.
        team: the ranks.

    Attributes:
        modules: per rank what is called.
        names: of the parameters, in the order in which torch finds them.
        parameters: ``parameters[rank][i]``.
        devices: each device of the team once, in the order of ranks.
        ranks_of: per device its ranks.
        is_mixed: whether there are devices of several kinds.
        buffers: of all ranks.
        watch: over the user's module.
        attributes: over its modules' attributes.

    Raises:
        ValueError: a parameter that has not been initialised.
        TypeError: a module that cannot be copied, or was compiled in a way that cannot be repeated.
    """

    def __init__(self, net: Module, team: Team) -> None:
        self.net, self.team = net, team
        named = dict(named_parameters_of(net))
        self.names = list(named)
        check_initialised([*named.values(), *net.buffers()])
        self.devices = list(dict.fromkeys(team.devices))
        self.changes = 0  # how often modes or frozen parameters were others
        self.moves = 0  # how often parameters were found in other memory, where that does no harm
        self._adopted: frozenset[int] = frozenset()  # parameters whose memory is the step's
        self._flats: dict[int, FlatTensors] = {}  # of each device, that memory
        self._memory: Look | None = None  # at the memory of all ranks' parameters
        self.retaken = 0  # how often forwards had put parameters elsewhere
        self.is_mixed = len({device.type for device in self.devices}) > 1
        self.ranks_of = [[rank for rank in team.ranks if team.devices[rank] == device] for device in self.devices]
        self._sharing = [rank for ranks in self.ranks_of if len(ranks) > 1 for rank in ranks]
        refuse_hooks(named)
        tree = ModuleTree(net)
        compiled = any(place.compiled is not None for place in tree.places)
        self.modules: list[Module] = []
        self.parameters: list[list[Parameter]] = []
        self._places: list[list[Module]] = []  # per rank all modules, in one order
        self._own_places = [place.module for place in tree.places]
        for rank in team.ranks:
            if rank == 0 and not (compiled and len(team) > 1):  # compiled ones must take turns, see device/compiled.py
                self._add(net, list(named.values()), self._own_places)
            else:
                self._add_twin(rank, tree)
        self.buffers = RankBuffers(self._own_places, self._places, team.devices)
        others = [rank for rank in team.ranks if self._places[rank] is not self._own_places]
        copies, devices = [self._places[rank] for rank in others], [team.devices[rank] for rank in others]
        self.watch = NetWatch(net, self._own_places, self.names, copies)
        self.attributes = AttributeWatch(self._own_places, copies, self.devices[0], devices)
        self._modes: list[bool] = []
        self._frozen: list[bool] = []
        self._mirror_flags()

    def _add(self, module: Module, parameters: list[Parameter], places: list[Module]) -> None:
        self.modules.append(module)
        self.parameters.append(parameters)
        self._places.append(places)

    def _add_twin(self, rank: int, tree: ModuleTree) -> None:
        device = self.team.devices[rank]
        first = self.team.devices.index(device)
        values = self.parameters[first] if first < rank else parameters_of(self.net)
        module, parameters = Twin(self.net, self.devices[0], device, values, share_buffers=rank == 0).made()
        places = [place.module for place in ModuleTree(module).places]
        for place, twin in zip(tree.places, places, strict=True):
            if place.compiled is not None:
                call = compiled_calls(place.module, place.compiled, len(self.team))[rank]
                twin.__dict__["_compiled_call_impl"] = MethodType(call, twin)
        self._add(module, parameters, places)

    @property
    def own(self) -> list[Parameter]:
        """The parameters of the user's module."""
        return self.watch.parameters

    def buffer_snapshot(self, others: Sequence[Module]) -> BufferSnapshot:
        """Of the user's module, and of other modules; nothing is taken yet."""
        return BufferSnapshot([*self._own_places, *others])

    def follow(self) -> None:
        """Makes all ranks' modules train, evaluate and freeze as the user's does, with the attributes that it has.

        Raises:
            RuntimeError: the user's module has other parameters than it had, or elsewhere, or other hooks of theirs;
                names the parameter and says what to do.
        """
        if not self.watch.is_as_left():
            self.watch.check_parameters()
            self._follow_moves(self.watch.moved())
            self.watch.check_hooks()
            self._mirror_flags()
            self.watch.leave()
        self.attributes.follow()

    def _follow_moves(self, moved: Sequence[int]) -> None:
        """Another step, say, has made parameters its own: they are where it has put them, and what they are."""
        if not moved:
            return
        for i in moved:
            p, twin = self.own[i], self.parameters[-1][i]
            is_alike = p.shape == twin.shape and p.dtype == twin.dtype and p.device == self.devices[0]
            if i in self._adopted or not is_alike:
                raise RuntimeError(
                    f"parameter {self.names[i]} was moved: it is {p.dtype} on {p.device} in other memory than this "
                    f"step gave it (.to, .half, assign=True, .data =, share_memory_() and another step's update do "
                    f"that): {ADVICE}"
                )
        for rank in self.ranks_of[0]:
            for i in moved:
                if self.parameters[rank][i] is not self.own[i]:
                    self.parameters[rank][i].data = self.own[i].data
        self.send_values(moved)
        self.moves += 1
        self.watch.remember()  # last: where Ctrl-C comes before, the next call begins again

    def _mirror_flags(self) -> None:
        modes = [module.training for module in self._own_places]
        frozen = [not parameter.requires_grad for parameter in self.own]
        if modes == self._modes and frozen == self._frozen:
            return
        if modes != self._modes and self._modes:
            self._send_merged_values()
        for places in self._places:
            for module, mode in zip(places, modes, strict=True):
                module.training = mode
        for row in self.parameters:
            for parameter, is_frozen in zip(row, frozen, strict=True):
                if parameter.requires_grad == is_frozen:
                    parameter.requires_grad_(not is_frozen)
        # Last: where Ctrl-C comes before, the next call begins again.
        self.changes += 1
        self._modes, self._frozen = modes, frozen

    def _send_merged_values(self) -> None:
        """A ``train()`` of a module's own may change more than the mode: weights that it merges, by ``.data``."""
        if any(type(module).train is not Module.train for module in self._own_places):
            self.send_values()

    @property
    def flags(self) -> tuple[object, ...]:
        """Which modules train, which parameters are frozen, and how often some were moved or attributes changed."""
        return tuple(self._modes), tuple(self._frozen), self.moves, self.attributes.changes

    @property
    def versions(self) -> list[int]:
        """How often each parameter of the user's module was written in place, as torch counts."""
        return list(map(_version_of, self.own))

    def writes(self) -> list[list[int]]:
        """How often ranks that share a device have written each parameter in place, as torch counts."""
        return [list(map(_version_of, self.parameters[rank])) for rank in self._sharing]

    def check_unwritten(self, before: list[list[int]]) -> None:
        """Raises RuntimeError if a rank has written a parameter since :meth:`writes` gave ``before``.

        Its memory is the other ranks' too: each would write it, at the same time, and read what another has written.
        """
        now = self.writes()
        if now != before:
            row = first_difference(now, before)
            name = self.names[first_difference(now[row], before[row])]
            raise RuntimeError(
                f"the forward of rank {self._sharing[row]} writes parameter {name} in place (a moving average, "
                "Embedding(max_norm=...)?): ranks of one device share its memory, so it was written once per rank. "
                "Write it between steps, or give each rank a device of its own, or use mgpu_core.DataParallel"
            )

    def send_values(self, places: Sequence[int] | None = None) -> None:
        """Gives the other devices the values that the user's module has, of all parameters or of some."""
        leaders = [ranks[0] for ranks in self.ranks_of[1:]]
        if leaders:
            wanted = range(len(self.own)) if places is None else places
            sources = [self.own[i].detach() for i in wanted]
            copies = [[self.parameters[rank][i].detach() for rank in leaders] for i in wanted]
            collectives.broadcast_into(sources, copies)

    def show_memory(self, device: int, values: FlatTensors, places: Collection[int]) -> None:
        """Makes the flat values of a device the memory of some of its ranks' parameters."""
        ranks = self.ranks_of[device]
        values.adopt(self.parameters[ranks[0]], places)
        for rank in ranks[1:]:
            values.show_to(self.parameters[rank], places)
        if 0 in ranks:
            values.show_to(self.own, places)
        self._adopted |= frozenset(places)
        self._flats[device] = values
        self._memory = None

    def let_go_of_all_but(self, places: Collection[int]) -> None:
        """Gives other parameters that were laid out memory of their own: they have left the optimizer."""
        for i in self._adopted.difference(places):
            for ranks in self.ranks_of:
                values = compact(self.parameters[ranks[0]][i])
                for rank in ranks:
                    self.parameters[rank][i].data = values
                if 0 in ranks:
                    self.own[i].data = values
        self._adopted = self._adopted.intersection(places)

    def retake(self) -> None:
        """After forwards: gives parameters that one has put elsewhere (``.data =``) the step's memory again.

        What rank 0 has put there, is everybody's, as in the drop-in.

        Raises:
            RuntimeError: a forward has changed what kind of tensor a parameter is.
        """
        if self._memory is not None and not self._memory.is_over():
            return
        moved = self._elsewhere()
        for i in moved:
            p, laid_out = self.parameters[0][i], self._flats[0].value_views[i]
            if p.shape != laid_out.shape or p.dtype != laid_out.dtype:
                raise RuntimeError(f"the forward gives parameter {self.names[i]} another shape or dtype: {ADVICE}")
        for place, values in self._flats.items():
            self.show_memory(place, values, moved)
        if moved:
            self.send_values(moved)
            self.retaken += 1
        self._memory = Look((), (), memory_questions(each for row in self.parameters for each in row))

    def _elsewhere(self) -> list[int]:
        """Parameters that are laid out, and lie elsewhere in some rank."""
        found: set[int] = set()
        for place, values in self._flats.items():
            places = list(self._adopted)
            wanted = memory_of([values.value_views[i] for i in places])
            for rank in self.ranks_of[place]:
                now = memory_of([self.parameters[rank][i] for i in places])
                found |= {places[each] for each in moved_between(now, wanted)}
        return sorted(found)

    def release(self) -> None:
        """Gives the user's module storage of its own again, of what is the step's."""
        for i in self._adopted:
            self.own[i].data = compact(self.own[i])
        self._adopted = frozenset()
        self._flats.clear()

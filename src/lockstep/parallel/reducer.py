"""The reducer: averages gradients over ranks while backward goes on, whatever way they came.

A *round* is one exchange of all buckets. It opens with the first gradient of a backward; buckets leave in the agreed
order as they become full; it closes at the end of that backward, where what is still missing counts as nothing.
Whatever else has to be done (the model has changed, a gradient grew once more after its bucket had left) is agreed on
by the words behind the last bucket, so that no rank waits for something the others do not know of.

What is averaged is whatever stands in `.grad`. Parts of it that were averaged before are equal on all ranks, and so
stay what they are: it does not matter how many backwards, with communication or without, made a gradient.
"""

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor, nn

from lockstep.collectives.kept import engines
from lockstep.errors import UsageError
from lockstep.parallel.buckets import MEBIBYTE
from lockstep.parallel.control import CARRIED, Control, as_tensor, say, understand
from lockstep.parallel.disagreement import refuse_disagreement
from lockstep.parallel.engine import NO_BACKWARD, at_the_end_of_backward, current_backward, enclosing_node
from lockstep.parallel.layout import Layout
from lockstep.parallel.members import Members
from lockstep.parallel.peers import Peers
from lockstep.parallel.rates import short_hash
from lockstep.parallel.same_model import compare_structure, compare_values, describe
from lockstep.parallel.slots import Slot
from lockstep.parallel.sparse import average_sparse
from lockstep.parallel.transport import Transport
from lockstep.world import current

_NEVER = NO_BACKWARD - 1  # the number of no backward
_NOTHING_CARRIED = (0.0,) * CARRIED


class Reducer:
    """Averages one model's gradients over ranks.

    Args:
        module: The model, equal on all ranks already.
        peers: The ranks.
        transport: How buckets travel.
        device: Where the model lies.
        caps: MiB in the first bucket, in the second and so on; the last one is for all others.
        ignored: Names of parameters that are none of its business.
        ends: Parameters with whose gradient a bucket is full, whatever it holds.

    Attributes:
        syncing: Whether a backward that begins now sends its gradients.
        inactive: Whether this rank has no more data and only keeps the others company.
        over_active: Whether the average is taken over the ranks that are not inactive.
        steps: How many optimizer steps this rank has taken, or given up.
        times: What the average is multiplied by at the very end of a round.
        carried: The sums over ranks of what `carry` was given before the last round.
    """

    def __init__(
        self,
        module: nn.Module,
        peers: Peers,
        transport: Transport,
        device: torch.device,
        *,
        caps: Sequence[float] = (1.0, 25.0),
        ignored: Collection[str] = (),
        ends: Collection[Tensor] = (),
    ) -> None:
        self.peers, self.transport = peers, transport
        self.syncing, self.inactive, self.over_active, self.steps = True, False, True, 0
        self.times = 1.0
        self.carried: tuple[float, ...] = _NOTHING_CARRIED
        self._load: Sequence[float] | Tensor = _NOTHING_CARRIED
        self.device = device
        self._feed = current().feed  # a rank that skips a batch trains on others than its peers from then on
        self._caps, self._ends = [int(cap * MEBIBYTE) for cap in caps], ends
        self._unsent = False
        self._sent = False  # whether this step's round has been
        self._stepped: set[int] | None = None  # what was stepped since the last round; None before the first one
        self._rates: list[float] = []  # of the steps since then
        self._handed: Slot | None = None  # one that had a gradient in the last round
        self._tasks: set[int] = set()  # the backward that is running, and those nested in it
        self._fast = _NEVER  # the backward whose gradients take the short way
        self._open = self._local = self._holding = self._failed = self._graphs = False
        self._late: list[Slot] = []
        self._agreed: list[int] | None = None  # the order of the next rounds, when it has just become known
        self.members = Members(module, self._arrived, ignored)
        self._layout = self._lay_out(self.members.scan())
        self._next = 0
        engines.add(self)

    def _lay_out(self, slots: list[Slot]) -> Layout:
        return Layout(slots, self.transport, self.device, self._caps, self._ends)

    def owns_any(self, ids: Collection[int]) -> bool:
        """Whether some of the parameters with these ids are its own."""
        return not self.members.ids.isdisjoint(ids)

    def _arrived(self, slot: Slot, _: Tensor) -> None:
        """A parameter's gradient has grown; called by autograd."""
        if current_backward() == self._fast:
            self._note(slot)
            return
        graph = torch.is_grad_enabled()
        with torch.no_grad():
            task = current_backward()
            if task not in self._tasks:
                self._enter(task)
            if self._local:
                self._keep(slot)
                return
            seen = self._layout.seen
            if seen is not None and slot.bucket is not None and not slot.fired:
                seen.append(slot.number)
            if graph and slot.param.grad is not None and slot.param.grad.requires_grad:
                slot.graph, self._graphs = slot.param.grad, True
            self._note(slot)
        if self._layout.seen is None and not graph and not self._holding:
            self._fast = task

    def _note(self, slot: Slot) -> None:
        slot.fired += 1
        bucket = slot.bucket
        if bucket is None:
            # Unfrozen or added since the layout was made: this round learns of it at its end.
            self.members.changed |= not slot.sparse
        elif slot.fired > slot.expected:
            self._late.append(slot)
        elif slot.fired == slot.expected and not self._holding:
            if slot.large:
                bucket.take(slot)
            bucket.waiting -= 1
            if not bucket.waiting:
                self._send_full()

    def _keep(self, slot: Slot) -> None:
        """A gradient that is not to be sent now."""
        self._unsent = slot.unsent = True
        if slot.bucket is None:
            self.members.changed |= not slot.sparse  # as in `_note`
        elif self._layout.has_place(slot):
            slot.bucket.keep(slot)

    def _enter(self, task: int) -> None:
        """The first gradient of a backward, or of one nested in it."""
        node = enclosing_node()
        if self._open and (node is not None or task < max(self._tasks)):
            self._tasks.add(task)
            return
        if self._open:
            self._abandon()
        self._tasks = {task}
        self._local = not self.syncing
        if not self._local:
            self._begin()
            at_the_end_of_backward(self._finish, node)

    def _begin(self) -> None:
        self._open, self._local = True, False
        # A model that was cast has gradients that do not fit into these buckets: they stay where they are until there
        # are others.
        self._holding = not self._layout.fits()
        self.members.changed = self.members.changed or self._holding

    def _send_full(self) -> None:
        """Send what is full, in the agreed order; the last bucket waits for the words behind it."""
        while self._next < len(self._layout.buckets) - 1 and not self._layout.buckets[self._next].waiting:
            bucket = self._layout.buckets[self._next]
            self._next += 1
            bucket.fill()
            self.transport.send(bucket)

    def _finish(self) -> None:
        """Complete the round; what it raises comes out of ``backward()``."""
        if not self._open:
            return
        try:
            with torch.no_grad():
                heard = self._exchange()
                factor = self._factor(heard)
                self._learn()
                while heard.changed or heard.late:
                    if heard.changed:
                        self._rearrange()
                    self._restart()
                    heard = self._exchange()
                self._multiply(factor)
        finally:
            self._close()

    def _exchange(self) -> Control:
        """Send what has not left yet, wait for everything and give it back."""
        silent = self._holding or self._failed or self.inactive
        self._send_rest(silent)
        for bucket in self._layout.buckets:
            self.transport.receive(bucket)
        heard = understand(self._layout.buckets[-1].words.tolist())
        refuse_disagreement(heard, self.peers, self.device, self.steps, self._feed.given, self._rates)
        if not silent:
            extras = [(slot, slot.param.grad) for slot in self._late if slot.param.grad is not None]
            for bucket in self._layout.buckets:
                bucket.hand_back()
            for slot, extra in extras:
                assert slot.param.grad is not None
                slot.param.grad.add_(extra.detach())
        average_sparse(self._layout.sparse, self.peers, silent=silent)
        return heard

    def _factor(self, heard: Control) -> float:
        """What the plain average over all ranks has to be multiplied by."""
        self.carried = heard.carried
        if heard.inactive and self.over_active:
            return self.times * self.peers.size / max(1.0, self.peers.size - heard.inactive)
        return self.times

    def _multiply(self, factor: float) -> None:
        """Once, at the very end, since a round may have had several exchanges."""
        if factor != 1:
            for bucket in self._layout.buckets:
                bucket.multiply(factor, tell=self.times != 1)
            for slot in self._layout.sparse:
                if slot.param.grad is not None:
                    slot.param.grad = slot.param.grad * factor
        if self._graphs:
            for bucket in self._layout.buckets:
                bucket.tie_graphs(factor)

    def _send_rest(self, silent: bool) -> None:
        waiting = [slot for bucket in self._layout.buckets if bucket.waiting for slot in bucket.slots if not slot.fired]
        words = say(
            changed=self.members.changed or self.members.stale(waiting),
            late=bool(self._late),
            failed=self._failed,
            inactive=self.inactive,
            steps=self.steps + self._feed.given,
            rates=short_hash(self._rates, self.steps) if self._stepped_all() else None,
        )[:-CARRIED]
        for bucket in self._layout.buckets[self._next :]:
            if silent:
                bucket.fill_nothing()
            else:
                bucket.fill()
            if bucket is self._layout.buckets[-1]:
                self._write(words, bucket.words)
            self.transport.send(bucket)
        self._next = len(self._layout.buckets)

    def _write(self, words: tuple[float, ...], into: Tensor) -> None:
        if isinstance(self._load, Tensor):
            into[-CARRIED:].copy_(self._load)
            into = into[:-CARRIED]
        else:
            words = (*words, *self._load)
        into.copy_(as_tensor(words, into.dtype))

    def _stepped_all(self) -> bool:
        """Whether all parameters were stepped since the last round: not by optimizers that have a part on each rank."""
        return self._stepped is not None and len(self._stepped) >= len(self._layout.slots)

    def _learn(self) -> None:
        """Expect the same of the next round; once, agree on the order in which gradients came on the first rank."""
        self._layout.expect_the_same(self._late)
        if self._layout.seen is None:
            return
        compare_values(self._layout.slots, self.peers, self.device)
        seen = torch.tensor(self._layout.order_seen(), device=self.device)
        self.peers.broadcast(seen)
        count, *order = seen.tolist()
        self._agreed = order if count else None

    def _rearrange(self) -> None:
        """The model has changed on some rank: all look again, and must have come to the same."""
        slots = self.members.scan()
        compare_structure(describe((slot.name, slot.param) for slot in slots), self.peers, self.device)
        compare_values(slots, self.peers, self.device)
        self._layout, self._agreed = self._lay_out(slots), None

    def _restart(self) -> None:
        if self._agreed is not None:
            self._layout.follow(self._agreed)
            self._agreed = None
        self._layout.restart()
        self._next, self._late, self._holding, self._failed = 0, [], False, False

    def _close(self) -> None:
        self._restart()
        if self._unsent:
            for slot in self._layout.slots:
                slot.unsent = False
        self._open = self._unsent = self._graphs = False
        self._sent = True
        self._load = _NOTHING_CARRIED
        self._fast = _NEVER
        self._tasks, self._stepped, self._rates = set(), set(), []
        self._handed = next((slot for slot in self._layout.dense if slot.param.grad is not None), None)

    def _abandon(self) -> None:
        """Complete the round of a backward that raised, for which others may be waiting; drop its gradients."""
        self._failed = True
        try:
            self._exchange()
        finally:
            self._close()

    def sync(self) -> None:
        """Average what has not been averaged yet; a rank without gradients takes part with nothing.

        Every rank must come here, or to a backward, equally often. Does nothing where this step's round has been.

        Raises:
            UsageError: Called within backward, or after one that raised.
            MismatchError: The ranks are in different steps, or have different models now.
            LostRankError: A rank left.
        """
        if self._open:
            self._refuse_open_round()
        if self._unsent or not self._sent or self._emptied():
            self._begin()
            self._finish()
        # The next call belongs to the next step, whether that has a backward on this rank or not.
        self._sent = False

    def carry(self, numbers: Sequence[float] | Tensor) -> None:
        """Add up three numbers more over ranks in the coming round, which costs no collective of its own.

        Args:
            numbers: On this rank; a tensor where they are not known yet without waiting for a device. The sums are in
                `carried` when the round is through, in the dtype of the last bucket's gradients, float32 at least.
        """
        self._load = numbers

    def give_up(self) -> None:
        """Leave this step, which counts as one: alone, this rank must not meet the others a step later."""
        self.steps += not self._sent  # where this step's round has been, the others go on, and it is behind

    def meet(self) -> None:
        """Show the others where this rank is, without gradients: they may be in a step that it leaves out."""
        before = self._stepped, self._sent
        self._begin()
        self._abandon()
        self._stepped, self._sent = before

    def keep_company(self) -> None:
        """Take part in a round of the others without gradients, and take none from it."""
        self.inactive = True
        try:
            self._begin()
            self._finish()
        finally:
            self.inactive = False

    def travel_by(self, transport: Transport) -> None:
        """Send buckets another way from the next round on."""
        self.transport = transport
        self._layout.build(transport)

    def before_step(self, params: Sequence[Tensor], has_closure: bool, rates: Sequence[float] = ()) -> None:
        """An optimizer is about to use the gradients of ``params``, at these ``rates``: average what is not yet."""
        if self._open:
            self._refuse_open_round()
        if self._unsent or (not has_closure and self._begins_with(params)):
            self._begin()
            self._finish()
        if self._stepped is not None:
            self._stepped.update(map(id, params))
            self._rates.extend(rates)
        self._sent = False
        self.steps += 1

    def _begins_with(self, params: Sequence[Tensor]) -> bool:
        """Whether this is a step of which this rank has had no backward, while others may have had one.

        What the last round gave was used for these parameters, by this optimizer or one before it, or is gone unused.
        """
        if self._stepped is None or not self._stepped.isdisjoint(map(id, params)):
            return True
        return self._emptied() and all(param.grad is None for param in params)

    def look_again(self, params: Iterable[object]) -> bool:
        """Whether some of ``params`` have come into the model unnoticed; then their gradients are unsent."""
        found = self.members.look_again(params)
        self._unsent = self._unsent or found
        return found

    def _emptied(self) -> bool:
        """Whether the gradients of the last round are gone: a new step has begun."""
        return self._handed is not None and self._handed.param.grad is None

    def _refuse_open_round(self) -> None:
        if current_backward() != NO_BACKWARD:
            raise UsageError(
                f"rank {self.peers.rank}: gradients are being averaged, and complete only when backward() is through. "
                f"Step the optimizer, or call lockstep.sync_gradients, after it."
            )
        self._abandon()
        raise UsageError(
            f"rank {self.peers.rank}: the last backward of this model raised before it was through, so its gradients "
            f"are not complete. Call optimizer.zero_grad() and another backward before the next step, on every rank."
        )

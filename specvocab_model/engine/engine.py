"""The rounds: the target judges a tree, the draft reads what stayed and grows the next one.

Everything that a round needs to know stands in tensors on the device. The host launches two graphs a round, target and
draft, and reads how many tokens came out while the draft runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specvocab_model.compiled_layers import Fuse, compiled
from specvocab_model.config import ConfigError
from specvocab_model.decode import DecodeOutput, check_draft
from specvocab_model.draft import SpecVocabDraft
from specvocab_model.engine.drafting import ChainDrafter, Tree, TreeDrafter, Verified
from specvocab_model.engine.forward import DraftForward, TargetForward
from specvocab_model.engine.rounds import NUM_COUNTS, State, accept, emit, likeliest
from specvocab_model.engine.shapes import COLUMN_STEP, PLAIN, DraftShape, width_for
from specvocab_model.engine.texts import Texts
from specvocab_model.engine.verification import accepted_path, draws_agree, next_of_chain
from specvocab_model.graphs import Graphs
from specvocab_model.heads import Head, InContextHead
from specvocab_model.sampling import Sampling, draw
from specvocab_model.target import Target
from specvocab_model.transfers import Readback

GREEDY = Sampling()
PREFILL_CHUNK = 256  # prompt tokens of one forward

TokenObserver = Callable[[int, list[int], int], None]
"""Sees what came out of every verification, and of the prompt: the prompt's place in the batch, its new tokens, and how
many of them, from the first on, are accepted drafts. The rest is the target's own: one token, or none after an EOS."""


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


class DecodeEngine:
    """Decodes up to ``batch_size`` prompts at a time: plainly, or with a draft."""

    def __init__(
        self,
        target: Target,
        model: SpecVocabDraft | None = None,
        head: Head | None = None,
        *,
        shape: DraftShape = PLAIN,
        capacity: int,
        batch_size: int = 1,
        sampling: Sampling = GREEDY,
        prefill_chunk: int = PREFILL_CHUNK,
        graphs: bool = True,
        compile: bool = True,
    ) -> None:
        """
        Args:
            target: its attention is switched, see ``TargetForward``.
            model, head: the draft, placed with ``decode.place_draft``, and its head; both None for plain decoding.
            shape: what is drafted.
            capacity: tokens that a prompt and its continuation may have together.
            sampling: how tokens are drawn; the drafts of a chain are drawn the same way, those of a tree are not.
            prefill_chunk: a shorter one spends less on padding, a longer one starts fewer forwards.
            graphs: capture CUDA graphs; nothing on the CPU.
            compile: on a GPU the target's layers, the draft's and what lies between them run under torch.compile. The
                first text waits for the compiler; not worth it for an engine that decodes little more than one.

        Raises:
            ValueError: draft, head and shape do not belong together, or see ``decode.check_draft``.
            ConfigError: the head follows one text, which this engine does not support, or has too few tokens for the
                tree.
        """
        if not (model is None) == (head is None) == (shape.depth == 0):
            raise ValueError(f"a draft, a head and a shape belong together, but model is {type(model).__name__}, head "
                             f"is {type(head).__name__} and shape is {shape}; give all, or none for plain decoding")
        if capacity < 2 or batch_size < 1 or prefill_chunk < 1:
            raise ValueError(f"capacity={capacity} must be at least 2, batch_size={batch_size} and prefill_chunk="
                             f"{prefill_chunk} at least 1")
        device, spec = target.device, target.spec
        self.target, self.shape, self.sampling = target.with_compiled_layers() if compile else target, shape, sampling
        fuse: Fuse = partial(compiled, device=device) if compile else _as_it_is
        self.capacity, self.batch_size, self.prefill_chunk = capacity, batch_size, prefill_chunk
        self.num_nodes = 1 + shape.num_drafts
        self.path_size = 1 + shape.depth
        self.max_length = spec.max_position_embeddings
        # Beside the text: a tree of the target's, one of the draft's after the verified path, a prompt's last chunk.
        most = capacity + max(self.num_nodes, self.path_size + shape.num_expanded, prefill_chunk)
        self.num_columns = -(-most // COLUMN_STEP) * COLUMN_STEP
        self.forward = TargetForward(self.target, batch_size=batch_size, num_columns=self.num_columns, fuse=fuse)
        self.graphs = Graphs(device, graphs)

        self.texts = Texts.finished_ones(batch_size, self.num_columns + prefill_chunk + 1, device)
        self.last_hidden = target.lm_head_weight.new_zeros(batch_size, spec.hidden_size)  # of the prompts' last tokens
        self.verified = Verified.nothing(batch_size, self.path_size, target.lm_head_weight)
        self.tree = Tree.chain(
            batch_size, shape.num_drafts, device=device,
            sampled_vocab_size=0 if sampling.greedy or not shape.is_chain else spec.vocab_size)
        self.report = torch.zeros(batch_size, NUM_COUNTS + self.path_size, dtype=torch.int64, device=device)
        # A number for each draft to be drawn, then one for each node to be judged.
        self.uniforms = torch.zeros(batch_size, shape.depth + self.num_nodes, dtype=torch.float64, device=device)
        self.readback = Readback(self.report)
        ends = torch.tensor(spec.eos_token_ids, dtype=torch.int64, device=device)
        self.state = State(self.texts, self.verified, self.tree, self.report, ends)
        self._likeliest, self._accept, self._emit = fuse(likeliest), fuse(accept), fuse(emit)
        self._rows = torch.arange(batch_size, device=device)[:, None]
        chunk = torch.ones(1, prefill_chunk, prefill_chunk, dtype=torch.bool, device=device)
        self._chunk_depths, self._chunk_ancestors = torch.arange(prefill_chunk, device=device)[None], chunk.tril()
        self.drafter: ChainDrafter | TreeDrafter | None = None
        if model is not None and head is not None:
            self._add_draft(model, head, fuse)

    def _add_draft(self, model: SpecVocabDraft, head: Head, fuse: Fuse) -> None:
        check_draft(self.target, model)
        if isinstance(head, InContextHead):
            raise ConfigError("head 'in_context' follows the text of one sequence, which the engine does not tell it; "
                              "measure it with decode.speculative_generate")
        self.max_length = min(self.max_length, model.architecture.max_position_embeddings)
        forward = DraftForward(self.target, model, batch_size=self.batch_size, num_columns=self.num_columns,
                               num_steps=self.shape.depth, fuse=fuse)
        if self.shape.is_chain:
            self.drafter = ChainDrafter(forward, head, self.shape, self.sampling, fuse)
            return
        support = head(self.target.lm_head_weight.new_zeros(1, self.target.spec.hidden_size)).logits.shape[1]
        if support < self.shape.top_k:
            raise ConfigError(f"a tree of top_k={self.shape.top_k} needs a head of as many tokens, and this one has "
                              f"{support}; draft a narrower tree or a chain")
        self.drafter = TreeDrafter(forward, head, self.shape, fuse)

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, generator: torch.Generator | None = None,
        on_tokens: TokenObserver | None = None,
    ) -> list[DecodeOutput]:
        """Continue prompts as the target would.

        Args:
            prompts: 1 to ``batch_size`` prompts of at least one token id; of any lengths.
            max_new_tokens: never exceeded; an EOS stops earlier, also inside an accepted run.
            generator: source of randomness when sampling, on the target's device. What is drawn for a prompt depends
                on its place in ``prompts``.
            on_tokens: called as soon as the host has the tokens; the next verification waits for it.

        Raises:
            ValueError: a limit that makes no sense, or a prompt that is empty or does not fit the capacity.
        """
        self._begin(prompts, max_new_tokens)
        longest = max(map(len, prompts))
        for end in range(self.prefill_chunk, longest + self.prefill_chunk, self.prefill_chunk):
            width = width_for(end, self.num_columns)
            self._run("prefill", partial(self._read_chunk, width), width)
            self.texts.chunk_starts += self.prefill_chunk
        self.texts.lengths.copy_(self.texts.prompt_lengths - 1)
        self._draw(generator)
        self._run("first", self._emit_first)
        answers: list[list[int]] = [[] for _ in prompts]
        rounds: list[list[tuple[int, int]]] = [[] for _ in prompts]  # accepted, judged
        unfinished = list(range(len(prompts)))
        self.readback.start()
        while True:
            # The host knows only afterwards how much came out: at most ``path_size`` more than what it has seen.
            known = max(len(prompts[row]) + len(answers[row]) for row in unfinished) + self.path_size
            if self.drafter is not None:
                self._draw(generator)
                width = width_for(known + self.path_size + self.shape.num_expanded, self.num_columns)
                self._run("draft", partial(self.draft, width), width)
            reports = self.readback.wait()
            for row in unfinished:
                count, accepted, judged = reports[row][:NUM_COUNTS]
                new_ids = reports[row][NUM_COUNTS : NUM_COUNTS + count]
                answers[row] += new_ids
                rounds[row].append((accepted, judged))
                if on_tokens is not None:
                    on_tokens(row, new_ids, accepted)
            unfinished = [row for row in unfinished if not self._is_over(answers[row], max_new_tokens)]
            if not unfinished:
                return [self._output(answer, counts) for answer, counts in zip(answers, rounds, strict=True)]
            if self.drafter is None:
                self._draw(generator)
            width = width_for(known + self.num_nodes, self.num_columns)
            self._run("verify", partial(self.verify, width), width)
            self.readback.start()

    def parts(self, length: int) -> dict[str, Callable[[], None]]:
        """The parts of a round of texts of ``length`` tokens, for who times them; the head once, for a tree's layer.

        Running them between two calls of ``generate`` changes nothing.
        """
        width = width_for(length + self.num_nodes, self.num_columns)
        parts = {"verify": partial(self._run, "verify", partial(self.verify, width), width)}
        if self.drafter is not None:
            hidden = self.last_hidden.repeat_interleave(self.shape.top_k, dim=0)
            head = self.drafter.head
            ask = partial(head, hidden) if self.shape.is_chain else partial(head.top_n, hidden, self.shape.top_k)
            width = width_for(length + self.path_size + self.shape.num_expanded, self.num_columns)
            parts["draft"] = partial(self._run, "draft", partial(self.draft, width), width)
            parts["head"] = partial(self._run, "head", ask)
        return {name: torch.inference_mode()(part) for name, part in parts.items()}

    def _begin(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        if not 1 <= len(prompts) <= self.batch_size:
            raise ValueError(f"{len(prompts)} prompts were given, but it must be 1 to batch_size={self.batch_size}")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1")
        lengths = [len(prompt) for prompt in prompts]
        if min(lengths) == 0 or max(lengths) + max_new_tokens > self.capacity:
            raise ValueError(f"prompts of {min(lengths)} to {max(lengths)} tokens with max_new_tokens={max_new_tokens} "
                             f"must have at least one token and fit into capacity={self.capacity} together")
        self.texts.begin(prompts, max_new_tokens)

    def _read_chunk(self, width: int) -> None:
        """Target and draft read ``prefill_chunk`` tokens of the prompts, from ``chunk_starts`` on."""
        starts = self.texts.chunk_starts
        columns = starts[:, None] + self._chunk_depths
        token_ids = self.texts.prompts.gather(1, columns)
        output = self.forward(token_ids, starts, self._chunk_ancestors, self._chunk_depths, width)
        last = self.texts.prompt_lengths - 1 - starts
        inside = ((last >= 0) & (last < self.prefill_chunk))[:, None]
        last = last.clamp(0, self.prefill_chunk - 1)[:, None]
        self.last_hidden.copy_(torch.where(inside, output.final_hidden[self._rows, last][:, 0], self.last_hidden))
        features = self.verified.features[:, 0]
        features.copy_(torch.where(inside, output.features[self._rows, last][:, 0], features))
        if self.drafter is not None:  # the last position's next token is not known yet: it is read again later
            self.drafter.forward.fill(output.features, self.texts.prompts.gather(1, columns + 1), starts, width)

    def _emit_first(self) -> None:
        self.verified.starts.copy_(self.texts.lengths)
        nothing = torch.zeros_like(self.texts.lengths)
        path = nothing[:, None].expand(-1, self.path_size)
        self._emit(self.state, path, nothing, nothing, self._choose(self.last_hidden, self.uniforms[:, -1]))

    def verify(self, width: int) -> None:
        """The target judges the tree; what it accepts and its own next token enter the text."""
        tree = self.tree
        output = self.forward(tree.token_ids, self.texts.lengths, tree.ancestors, tree.depths, width)
        self.verified.starts.copy_(self.texts.lengths)
        uniforms = self.uniforms[:, self.shape.depth :]
        if tree.probabilities.shape[1]:
            path = self._accept_drawn(self.target.logits(output.final_hidden), uniforms)
        else:
            choices = self._choose(output.final_hidden, uniforms)
            path = self._accept(self.state, choices, self.max_length, self.shape.depth)
        if not self.shape.is_chain:
            self.forward.cache.compact(self.verified.starts[:, None] + path, self.verified.starts)
        features = self.verified.features
        torch.gather(output.features, 1, path[:, :, None].expand_as(features), out=features)

    def _accept_drawn(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        """``accept`` for a chain that was drawn."""
        tree, limits = self.tree, self.texts.most_accepted(self.max_length, self.shape.depth)
        probabilities = self.sampling.probabilities(logits)
        agree = draws_agree(tree.token_ids, probabilities, tree.probabilities, uniforms[:, :-1])
        path, num_accepted = accepted_path(agree, tree.ancestors, tree.depths, limits, self.path_size)
        following = next_of_chain(probabilities, tree.probabilities, num_accepted, limits, uniforms[:, -1])
        self._emit(self.state, path, num_accepted, limits, following)
        return path

    def draft(self, width: int) -> None:
        """The draft reads the newly verified positions and writes the next tree."""
        assert self.drafter is not None
        self.drafter(self.verified, self.tree, self.uniforms[:, : self.shape.depth], width)

    def _choose(self, final_hidden: Tensor, uniforms: Tensor) -> Tensor:
        """The target's token after hidden states [.., d]: the likeliest, or drawn with ``uniforms`` [..]."""
        if self.sampling.greedy:
            return self._likeliest(final_hidden, self.target.lm_head_weight, self.target.spec)
        return draw(self.sampling.probabilities(self.target.logits(final_hidden)), uniforms)

    def _run(self, name: str, function: Callable[[], object], width: int = 0) -> None:
        self.graphs.run((name, width), function, self._stand_still)

    def _stand_still(self) -> Callable[[], object]:
        """While a function is captured, no sequence moves: then a round changes nothing but leftovers."""
        unfinished = self.texts.finished.clone()
        self.texts.finished.fill_(True)
        return lambda: self.texts.finished.copy_(unfinished)

    def _draw(self, generator: torch.Generator | None) -> None:
        if not self.sampling.greedy:
            self.uniforms.uniform_(generator=generator)

    def _is_over(self, text: Sequence[int], max_new_tokens: int) -> bool:
        return text[-1] in self.target.spec.eos_token_ids or len(text) >= max_new_tokens

    def _output(self, text: list[int], rounds: Sequence[tuple[int, int]]) -> DecodeOutput:
        return DecodeOutput(
            sequences=text,
            num_target_forwards=len(rounds),
            accepted_per_round=[accepted for accepted, _ in rounds[1:]],  # the first is the prefill
            proposals=[judged for _, judged in rounds[1:]],
            finish_reason="stop" if text[-1] in self.target.spec.eos_token_ids else "length",
        )

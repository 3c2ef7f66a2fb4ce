"""``generate`` of transformers for many callers: prompts of unequal lengths in one batch, and each text as alone.

Prompts are padded on the left, with a mask; those of an encoder on the right.  A text ends at its own end or limit,
whatever the others of its batch do::

    request 1   . . . a b c │ d e ■ · · ·      ■ its end: what follows is cut off
    request 2   f g h i j k │ l m n o p q      its limit of tokens
                 one width    new tokens

Only requests whose options treat rows apart are joined.  Whether the model itself does is looked at in the first joined
batches: the scores of the shortest and the longest prompt must be those that they have alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch.nn import Module
from torch.nn.functional import pad

from mgpu_core.devices.transfer import to_device
from mgpu_core.inference.requests import Call, ServingModule
from mgpu_core.support.extras import require
from mgpu_core.support.warnings import warn_user
from mgpu_core.trees.comparison import any_in_half, difference
from mgpu_core.trees.moves import is_spread
from mgpu_core.trees.nested import Replicate, Rows, map_leaves, unwrapped

__all__ = ["Generation"]

# Options whose work on a row depends on this row alone, and not on the number of tokens before it.
_SAMPLING = {
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"),
}
_BY_ROW = {
    *_SAMPLING,
    *("max_new_tokens", "max_length", "min_new_tokens", "bad_words_ids", "suppress_tokens", "renormalize_logits"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "remove_invalid_values"),
    *("use_cache", "cache_implementation", "disable_compile", "_from_model_config", "transformers_version"),
    *("early_stopping", "length_penalty"),  # of beams, which are not by row
}
_NEUTRAL = {"num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1, "repetition_penalty": 1.0, "min_length": 0}
_NARROWEST = 64  # tokens: shorter prompts are padded to each other whatever their lengths
_CHECKED_TOKENS = 2
_KEPT_CONFIGS = 100


class _Prompts(NamedTuple):
    """The prompts of a request or a batch, by row.

    Attributes:
        ids, mask: ``(rows, tokens)``.
        widths: of the requests that the rows are of, in tokens; the others are padding for their batch.
        limits: of new tokens.
        streams: of the rows that have a streamer; ``None``: of the others.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    widths: torch.Tensor
    limits: torch.Tensor
    streams: Sequence[_Stream | None]


class Generation(ServingModule):
    """``generate`` of a transformers model for a :class:`mgpu_core.Predictor`, which joins prompts of unequal lengths.

    ::

        with mgpu_core.Predictor(Generation(model, tokenizer), [0, 1]) as predict:
            text = predict("Once upon a time", max_new_tokens=40)

    A request is called like ``model.generate``, and has the same answer: ids of shape ``(rows, tokens)``.  With a
    tokenizer it may be a text, or a list of texts; the answer is the text that follows, without special tokens,
    or a list.  Requests with equal options are joined, and each may have its own ``max_new_tokens`` and ``streamer``.
    Prompts of more than 64 tokens are joined with those of up to twice their length.

    Where rows may see each other or the padding, requests are answered one at a time, and a warning says why, once for
    each reason: beams, a repetition penalty, stopping criteria, processors of scores, inputs besides ids and mask, no
    limit of tokens; all requests, where the model gives a padded prompt other scores than alone.  Sums are rounded in
    another order than alone, so where two tokens are equally likely the other one may be taken.

    Args:
        model: has ``generate``; also one of :func:`mgpu_core.place`.
        tokenizer: of texts; ``None``: requests are ids.

    Raises:
        TypeError: the model has no ``generate`` of transformers.
    """

    def __init__(self, model: Module, tokenizer: Any = None) -> None:
        super().__init__()
        if not callable(getattr(model, "generate", None)) or getattr(model, "generation_config", None) is None:
            raise TypeError(f"{type(model).__name__} has no generate of transformers")
        config: Any = model.config
        self.model, self.tokenizer = model, tokenizer
        if is_spread(model):
            self.__dict__["to"] = model.to  # which refuses
        self._has_encoder = bool(config.is_encoder_decoder)
        self._context = getattr(config.get_text_config(), "max_position_embeddings", None)
        generation_config: Any = model.generation_config
        self._config = generation_config.to_diff_dict()
        self._configs: dict[str, Any] = {}  # of requests, by their contents
        self._told: set[str] = set()
        self._checked: set[bool] = set()  # batches without padding, and with it
        self._sees_others = False

    def encode(self, call: Call, future: Future[Any]) -> Call:
        """Return the prompts of a call and its options, or the call as it is, where it is answered alone.

        Raises:
            TypeError: texts without a tokenizer, or with ``return_dict_in_generate``.
            RuntimeError: the model's configuration was changed.
        """
        if self.model.generation_config.to_diff_dict() != self._config:
            raise RuntimeError(
                "model.generation_config was changed after Generation(model) was made, and ranks may have copies of "
                "the one before: pass options to each request, or make Generation and the Predictor anew"
            )
        args, options = call[0], dict(call[1])
        if (config := options.get("generation_config")) is not None:  # which its caller may change before the answer
            options["generation_config"] = self._kept(deepcopy(config))
        if options.get("streamer") is not None:
            options["streamer"] = _Stream(options["streamer"], future)
        prompts = [*args, *(options[name] for name in ("input_ids", "inputs") if name in options)]
        ids: Any = prompts[0] if len(prompts) == 1 else None
        answers = "ids"
        if isinstance(ids, str) or (isinstance(ids, list) and ids and isinstance(ids[0], str)):
            if options.get("return_dict_in_generate"):
                raise TypeError("return_dict_in_generate answers no texts: pass ids")
            answers = "text" if isinstance(ids, str) else "texts"
            ids, options["attention_mask"] = self._ids_of([ids] if isinstance(ids, str) else ids)
            args = (ids,)
        alone = args, options.copy()
        for name in ("input_ids", "inputs"):
            options.pop(name, None)
        mask, stream = options.pop("attention_mask", None), options.pop("streamer", None)
        for name in options.keys() & _BY_ROW:  # a tensor's value says with which requests it is joined
            if isinstance(options[name], torch.Tensor):
                options[name] = options[name].tolist()
        known = self._known(options)
        if stream is not None:
            stream.is_sampled = bool(known.get("do_sample"))
        reason = self._why_alone(ids, mask, stream, known)
        if reason is not None:
            if reason not in self._told:
                self._told.add(reason)
                warn_user(f"{reason}: requests like this one are answered one at a time")
            whole = map_leaves(alone, lambda leaf: Replicate(leaf) if isinstance(leaf, torch.Tensor) else leaf)
            return (), {"alone": whole, "rows": Rows([None]), "answers": answers}
        counts = ids.size(1), self._limit(ids, known)
        widths, limits = (torch.full((len(ids),), count, device=ids.device) for count in counts)
        for name in ("max_new_tokens", "max_length"):
            options.pop(name, None)
        mask = self._mask_of(ids, known) if mask is None else mask
        return _Prompts(ids, mask, widths, limits, Rows([stream] * len(ids))), {**options, "answers": answers}

    def bucket_by(self, *prompts: Any, **options: Any) -> Hashable:
        """Return the width of the batches that a request can be in; a new object for one that is answered alone."""
        if not prompts or self._sees_others:
            return object()
        width: int = prompts[0].size(1)
        return max(_NARROWEST, 1 << (width - 1).bit_length())

    def collate(self, calls: list[Call]) -> Call:
        """Return the prompts of all calls, padded to one width."""
        options = calls[0][1]
        if "alone" in options:
            return (), {"alone": unwrapped(options["alone"]), "answers": options["answers"]}
        requests = [_Prompts(*args) for args, _ in calls]
        width, device = max(each.ids.size(1) for each in requests), requests[0].ids.device
        padding = _padding(self._known(options))
        if self._sees_others and len(requests) > 1:
            options = {**options, "apart": True}
        joined = _Prompts(
            torch.cat([self._padded(to_device(each.ids, device), width, padding) for each in requests]),
            torch.cat([self._padded(to_device(each.mask, device), width, 0) for each in requests]),
            torch.cat([to_device(each.widths, device) for each in requests]),
            torch.cat([to_device(each.limits, device) for each in requests]),
            [stream for each in requests for stream in each.streams],
        )
        checks = len(calls) > 1 and _is_padded(requests) not in self._checked
        return joined, {**options, "is_joined": len(calls) > 1, "checks": checks}

    def split(self, outputs: Any, calls: list[Call]) -> Sequence[Any]:
        """Return the answer to each call: its texts, cut off at their ends."""
        texts, was_checked, reason = outputs
        if "alone" in calls[0][1]:
            answers, (args, _) = calls[0][1]["answers"], unwrapped(calls[0][1]["alone"])
            return [texts if answers == "ids" else self._as_asked(texts, args[0], None, answers)]
        requests = [_Prompts(*args) for args, _ in calls]
        if reason is not None and not self._sees_others:
            self._sees_others = True
            warn_user(f"{reason}. All requests are answered one at a time from now on", RuntimeWarning)
        elif was_checked and reason is None:
            self._checked.add(_is_padded(requests))
        known, answers = self._known(calls[0][1]), calls[0][1]["answers"]
        width = 1 if self._has_encoder else max(each.ids.size(1) for each in requests)
        parts = texts.split([len(each.ids) for each in requests])
        failures = [each.streams[0] and each.streams[0].failure for each in requests]
        return [
            failure or self._own(part, width, request, known, answers)
            for part, request, failure in zip(parts, requests, failures, strict=True)
        ]

    def _own(self, texts: torch.Tensor, width: int, prompts: _Prompts, known: dict[str, Any], answers: str) -> Any:
        """Return the texts of a request as alone: after its own prompts, up to the end of the longest one."""
        new = texts[:, width:]
        is_end = torch.isin(new, torch.tensor(_ends(known), dtype=new.dtype, device=new.device)).long()
        counts = (is_end.cumsum(1) - is_end == 0).sum(1)  # with the end
        counts = torch.minimum(counts, to_device(prompts.limits, new.device))
        new = new[:, : int(counts.max())]
        places = torch.arange(new.size(1), device=new.device)
        new = new.masked_fill(places >= counts[:, None], _padding(known))
        start = texts[:, :1] if self._has_encoder else to_device(prompts.ids, new.device)
        return self._as_asked(torch.cat([start, new], 1), prompts.ids, counts, answers)

    def forward(
        self, *prompts: Any, alone: Call | None = None, answers: str = "ids", is_joined: bool = False,
        checks: bool = False, apart: bool = False, **options: Any,
    ) -> tuple[Any, bool, str | None]:  # fmt: skip
        """Return the texts of a batch, whether its scores were looked at, and how they differ from those alone."""
        if alone is not None:
            return self.model.generate(*alone[0], **alone[1]), False, None
        batch = _Prompts(*prompts)
        reason = self._difference(batch, options) if checks else None
        most = int(batch.limits.max())
        fits = self._has_encoder or self._context is None or batch.ids.size(1) + most <= self._context
        if is_joined and (apart or reason is not None or not fits):
            return self._by_row(batch, options), checks, reason
        return self._texts(batch, options, most, is_joined=is_joined), checks, None

    def _texts(self, batch: _Prompts, options: dict[str, Any], most: int, *, is_joined: bool) -> Any:
        known, limits = self._known(options), batch.limits
        if any(batch.streams):
            before = [self._columns(batch, row).start for row in range(len(limits))]
            streams = _Streams(batch.streams, before, limits.tolist(), _ends(known))
            options = {**options, "streamer": streams}
        if is_joined:
            ends = _OwnLimits(limits + (1 if self._has_encoder else batch.ids.size(1)))
            stopping = require("transformers", "Generation").StoppingCriteriaList([ends])
            options = {"pad_token_id": _padding(known), **options, "stopping_criteria": stopping}
        return self.model.generate(input_ids=batch.ids, attention_mask=batch.mask, max_new_tokens=most, **options)

    def _by_row(self, batch: _Prompts, options: dict[str, Any]) -> torch.Tensor:
        """Return the texts of a batch, made one after the other."""
        texts = []
        for row, ids in enumerate(batch.ids):
            prompt = self._prompt(batch, row)
            text = self._texts(prompt, options, int(prompt.limits), is_joined=False)[0]
            texts.append(text if self._has_encoder else torch.cat([ids, text[prompt.ids.size(1) :]]))
        padding = float(_padding(self._known(options)))
        return torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=padding)

    def _difference(self, batch: _Prompts, options: dict[str, Any]) -> str | None:
        """Return how the scores of the shortest or the longest prompt differ in the batch; ``None``: they do not."""
        tokens = {"max_new_tokens": _CHECKED_TOKENS, "min_new_tokens": _CHECKED_TOKENS, "do_sample": False}
        given = {name: value for name, value in options.items() if name not in _SAMPLING}
        given.update(tokens, output_logits=True, return_dict_in_generate=True)
        given["pad_token_id"] = _padding(self._known(options))
        together = self.model.generate(input_ids=batch.ids, attention_mask=batch.mask, **given).logits
        half = any_in_half(self.model.parameters()) or torch.is_autocast_enabled(batch.ids.device.type)
        for row in (int(batch.widths.argmin()), int(batch.widths.argmax())):
            prompt = self._prompt(batch, row)
            alone = self.model.generate(input_ids=prompt.ids, attention_mask=prompt.mask, **given).logits
            for one, other in zip(together, alone, strict=True):
                text = difference(one[row], other[0], half=half)
                if text is not None:
                    return (
                        f"{type(self.model).__name__} gives a prompt other scores beside others than alone, as if it "
                        f"saw them, or the padding: {text}"
                    )
                if one[row].argmax() != other[0].argmax():
                    break  # as likely: they go on with other tokens
        return None

    def _kept(self, config: Any) -> Any:
        """Return the configuration that was the first with these contents: requests with the same one are joined."""
        if len(self._configs) >= _KEPT_CONFIGS:
            self._configs.clear()
        try:
            return self._configs.setdefault(config.to_json_string(ignore_metadata=True), config)
        except TypeError:  # a tensor among them, say
            return config

    def _known(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return all options that count: those of a call, then of its configuration, then of the model's."""
        config = options.get("generation_config")
        known = {**self._config, **({} if config is None else config.to_diff_dict()), **options}
        return {name: value for name, value in known.items() if name not in ("generation_config", "answers")}

    def _limit(self, ids: torch.Tensor, known: dict[str, Any]) -> Any:
        """Return how many new tokens a request may have; ``None``: nothing says so."""
        if known.get("max_new_tokens") is not None or known.get("max_length") is None:
            return known.get("max_new_tokens")
        return known["max_length"] - (1 if self._has_encoder else ids.size(1))

    def _why_alone(self, ids: Any, mask: Any, stream: Any, known: dict[str, Any]) -> str | None:
        """Return why a request cannot be joined with others; ``None``: it can."""
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or not ids.numel():
            return "a prompt is no tensor of ids of shape (rows, tokens)"
        if mask is not None and (
            not isinstance(mask, torch.Tensor) or mask.shape != ids.shape or not mask.any(1).all()
        ):
            return "attention_mask has another shape than the ids, or leaves a prompt out"
        for name, value in known.items():
            if name not in _BY_ROW and value is not None and value is not False and _NEUTRAL.get(name) != value:
                return f"generate with {name} may not treat each prompt as alone"
        if any(len(each) > 1 and _padding(known) in each for each in known.get("bad_words_ids") or ()):
            return "bad_words_ids with the token of padding would see it"
        limit = self._limit(ids, known)
        if not isinstance(limit, int) or limit < 1:
            return "generate has no max_new_tokens of 1 or more"
        return "a streamer is for one prompt" if stream is not None and len(ids) > 1 else None

    def _ids_of(self, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ids of texts, padded to each other, and their mask."""
        if self.tokenizer is None:
            raise TypeError("prompts that are texts need a tokenizer: Generation(model, tokenizer)")
        rows = [torch.tensor(self.tokenizer(text)["input_ids"], dtype=torch.long)[None] for text in texts]
        width, padding = max(row.size(1) for row in rows), _padding(self._known({}))
        ids = torch.cat([self._padded(row, width, padding) for row in rows])
        return ids, torch.cat([self._padded(torch.ones_like(row), width, 0) for row in rows])

    def _mask_of(self, ids: torch.Tensor, known: dict[str, Any]) -> torch.Tensor:
        """Return the mask that transformers takes where none is given: without padding, unless it ends texts, too."""
        padding = known.get("pad_token_id")
        if self._has_encoder or padding is None or padding in _ends(known):
            return torch.ones_like(ids)
        return ids.ne(padding).long()

    def _columns(self, batch: _Prompts, row: int) -> slice:
        """Return the columns of a row that its request has brought; its batch has padded it to the others."""
        width, count = batch.ids.size(1), int(batch.widths[row])
        return slice(0, count) if self._has_encoder else slice(width - count, width)

    def _prompt(self, batch: _Prompts, row: int) -> _Prompts:
        """Return a row as its request has brought it."""
        rows = slice(row, row + 1)
        ids, mask = (each[rows, self._columns(batch, row)] for each in (batch.ids, batch.mask))
        return _Prompts(ids, mask, batch.widths[rows], batch.limits[rows], batch.streams[rows])

    def _padded(self, rows: torch.Tensor, width: int, value: int) -> torch.Tensor:
        missing = width - rows.size(1)
        return pad(rows, (0, missing) if self._has_encoder else (missing, 0), value=value)

    def _as_asked(self, texts: torch.Tensor, ids: torch.Tensor, counts: torch.Tensor | None, answers: str) -> Any:
        """Return ids, or the texts after the prompts, up to so many new tokens; ``None``: all of them."""
        if answers == "ids":
            return texts
        width = 1 if self._has_encoder else ids.size(1)
        ends = [texts.size(1)] * len(texts) if counts is None else (counts + width).tolist()
        rows = [row[width:end] for row, end in zip(texts, ends, strict=True)]
        decoded = [self.tokenizer.decode(row, skip_special_tokens=True) for row in rows]
        return decoded[0] if answers == "text" and len(decoded) == 1 else decoded


class _Stream:
    """The streamer of a request: it gets each token once, also where a batch is answered again, and always an end.

    Args:
        streamer: the user's.
        future: of the answer; the stream ends with it at the latest.

    Attributes:
        is_sampled: answered again, its tokens would be others.
        failure: the error of the streamer in a batch; the request fails by it, and the others go on.
    """

    def __init__(self, streamer: Any, future: Future[Any]) -> None:
        self._streamer, self._puts, self._place, self._has_ended = streamer, 0, 0, False
        self.is_sampled = False
        self.failure: Exception | None = None
        future.add_done_callback(lambda _: self.end())

    def begin(self, ids: torch.Tensor) -> None:
        """Put the prompt.

        Raises:
            RuntimeError: tokens of a sampled text were put before.
        """
        if self.is_sampled and self._puts > 1:
            raise RuntimeError("a batch was answered again, and its sampled text would not go on as it was streamed")
        self._place = 0
        self.put(ids)

    def put(self, ids: torch.Tensor) -> None:
        """Put the next token, unless it was put before."""
        self._place += 1
        if self._place > self._puts and not self._has_ended:
            self._puts = self._place
            self._streamer.put(ids)

    def end(self) -> None:
        """End the stream, once."""
        if not self._has_ended:
            self._has_ended = True
            self._streamer.end()


class _Streams:
    """Gives each row of a batch to its stream, as long as its text goes on.

    Args:
        streams: by row; ``None``: it has none.
        before: by row the tokens of padding before its prompt.
        limits: by row of new tokens.
        ends: tokens that end a text.
    """

    def __init__(
        self, streams: Sequence[_Stream | None], before: list[int], limits: list[int], ends: list[int]
    ) -> None:
        self._streams, self._before, self._left, self._ends = streams, before, limits, ends
        self._has_begun = False

    def put(self, ids: torch.Tensor) -> None:
        """Take the prompts, and then the next token of each row."""
        for row, stream in enumerate(self._streams):
            if stream is None or stream.failure is not None:
                continue
            try:
                self._put(row, stream, ids[row : row + 1])
            except Exception as error:  # a caller that has gone, say
                stream.failure = error
        self._has_begun = True

    def _put(self, row: int, stream: _Stream, ids: torch.Tensor) -> None:
        if not self._has_begun:
            stream.begin(ids[:, self._before[row] :])
        elif self._left[row] > 0:
            stream.put(ids)
            self._left[row] = 0 if int(ids) in self._ends else self._left[row] - 1
            if not self._left[row]:
                stream.end()

    def end(self) -> None:
        """Do nothing: each stream ends with its text, or with the answer."""


class _OwnLimits:
    """Ends each row of a batch at its own length; one of transformers' stopping criteria."""

    def __init__(self, lengths: torch.Tensor) -> None:
        self._lengths = lengths

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return to_device(self._lengths, ids.device) <= ids.size(1)


def _is_padded(requests: Sequence[_Prompts]) -> bool:
    return len({each.ids.size(1) for each in requests}) > 1


def _ends(known: dict[str, Any]) -> list[int]:
    """Return the tokens that end a text."""
    ends = known.get("eos_token_id")
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def _padding(known: dict[str, Any]) -> int:
    """Return the token behind texts that have ended, as transformers has it; 0 where no text ends."""
    padding = known.get("pad_token_id")
    return int(next(iter(_ends(known)), 0) if padding is None else padding)

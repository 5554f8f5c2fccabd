"""Prompts, and the target's answers to them."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field

from omegaconf import MISSING

from specvocab_model.config.checks import ConfigError, at_least, fraction, not_empty, one_of, temperature

ENGINES = ("transformers", "vllm", "openai")


@dataclass(kw_only=True, slots=True)
class SourceConfig:
    """Where prompts come from; the forms of a record are listed in data_gen/prompts.py."""

    path: str = MISSING  # a .jsonl, .json, .csv or .parquet file, or a data set's folder or hub id
    subset: str | None = None  # of a data set: its configuration's name
    split: str = "train"  # of a data set
    num_records: int | None = None  # read so many from its start; null: all
    weight: float | None = None  # its share of the mixture, relative to the others'; null: all of its prompts

    def __post_init__(self) -> None:
        not_empty("generation.sources: path", self.path)
        at_least(f"generation.sources: num_records of {self.path}", self.num_records, 1)
        if self.weight is not None and not 0 < self.weight < math.inf:
            raise ConfigError(f"generation.sources: weight={self.weight} of {self.path} must be positive and finite")


@dataclass(kw_only=True, slots=True)
class GenerationConfig:
    """Prompts and the target's own answers to them."""

    engine: str = "transformers"
    base_urls: list[str] = field(default_factory=list)  # of the openai engine: http://host:8000, one for each server
    served_model: str | None = None  # the servers' name for the target; null: target.model
    server_concurrency: int = 256  # requests under way at one time, for each server and process
    server_timeout: float = 900.0  # seconds of one request
    server_attempts: int = 6  # for each prompt; then it is rejected
    server_patience: float = 900.0  # seconds without any server, then the command ends
    server_api_key_env: str | None = None  # the environment variable that holds the servers' API key
    prompt_files: list[str] = field(default_factory=list)  # short for sources that are just a path
    sources: list[SourceConfig] = field(default_factory=list)
    responses: str = "regenerate"  # the target writes every answer anew; keep: those of the sources, masked exactly
    samples_per_prompt: int = 1
    thinking_share: float | None = None  # prompts with enable_thinking=true, the others false; null: as the template
    magpie_prompts: int = 0  # user turns the target invents from its own chat template
    magpie_temperature: float = 1.0
    magpie_max_new_tokens: int = 96
    num_prompts: int | None = None  # null: all
    validation_fraction: float = 0.02
    max_prompt_tokens: int = 1024
    max_new_tokens: int = 1024
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    batch_tokens: int | None = None  # (prompt + max_new_tokens) * rows of one generation batch; null: what fits
    rows_per_shard: int = 2048  # at most; few prompts are spread over more shards, so that every rank has some
    near_duplicate_threshold: float | None = None  # Jaccard similarity of two questions' word 5-grams; null: off
    min_response_tokens: int = 1
    max_repetition: float | None = None  # share of 8-grams, of a question or an answer, that repeat; null: no limit
    max_rejected_share: float = 0.05  # of the prompts; more that are malformed or get no answer stop the run

    def __post_init__(self) -> None:
        one_of("generation.engine", self.engine, ENGINES)
        self._check_servers()
        self._check_prompts()
        self._check_answers()
        fraction("generation.validation_fraction", self.validation_fraction)
        fraction("generation.top_p", self.top_p)
        for name in ("magpie_prompts", "top_k"):
            at_least(f"generation.{name}", getattr(self, name), 0)
        for name in ("temperature", "magpie_temperature"):
            temperature(f"generation.{name}", getattr(self, name))
        for name in ("magpie_max_new_tokens", "max_prompt_tokens", "max_new_tokens", "batch_tokens", "rows_per_shard"):
            at_least(f"generation.{name}", getattr(self, name), 1)
        at_least("generation.num_prompts", self.num_prompts, 1)
        if self.top_p == 0:
            raise ConfigError("generation.top_p=0 leaves no token; for greedy answers set temperature=0")
        if self.magpie_prompts and self.magpie_temperature == 0:
            raise ConfigError("generation.magpie_temperature=0 would invent the same prompt every time; set it to 1.0")
        if self.temperature == 0 and (self.top_p < 1 or self.top_k > 0):
            raise ConfigError(f"generation.temperature=0 is greedy and cannot be combined with "
                              f"top_p={self.top_p}, top_k={self.top_k}; set a temperature or drop them")

    def _check_prompts(self) -> None:
        if len({source.weight is None for source in self.sources}) > 1 or (
                self.prompt_files and any(source.weight for source in self.sources)):
            raise ConfigError("generation.sources: give a weight to every source, or to none; name files that are to "
                              "be mixed under sources, not under prompt_files")
        if self.near_duplicate_threshold == 0:
            raise ConfigError("generation.near_duplicate_threshold=0 calls all prompts alike; set about 0.8, or null")

    def _check_answers(self) -> None:
        one_of("generation.responses", self.responses, ("regenerate", "keep"))
        for name in ("max_rejected_share", "max_repetition", "near_duplicate_threshold", "thinking_share"):
            if getattr(self, name) is not None:
                fraction(f"generation.{name}", getattr(self, name))
        for name in ("samples_per_prompt", "min_response_tokens"):
            at_least(f"generation.{name}", getattr(self, name), 1)
        if self.samples_per_prompt > 1 and (self.temperature == 0 or self.responses == "keep"):
            raise ConfigError(f"generation.samples_per_prompt={self.samples_per_prompt} would give the same answer so "
                              "many times; set a temperature and responses=regenerate, or samples_per_prompt=1")
        if self.responses == "keep" and self.magpie_prompts:
            raise ConfigError(f"generation.magpie_prompts={self.magpie_prompts} have no answers that "
                              "generation.responses=keep could keep; set it to 0")

    def _check_servers(self) -> None:
        if (self.engine == "openai") != bool(self.base_urls):
            raise ConfigError(f"generation.engine={self.engine!r} with generation.base_urls={self.base_urls}: the "
                              "openai engine needs the URLs of its servers, and no other engine has any")
        if wrong := [url for url in self.base_urls if not re.match(r"https?://[^/\s]", url)]:
            raise ConfigError(f"generation.base_urls holds {wrong[0]!r}; give URLs such as http://localhost:8000")
        if len(set(self.base_urls)) < len(self.base_urls):
            raise ConfigError(f"generation.base_urls={self.base_urls} names a server twice; "
                              "raise server_concurrency to send it more requests")
        for name in ("server_concurrency", "server_attempts"):
            at_least(f"generation.{name}", getattr(self, name), 1)
        for name in ("server_timeout", "server_patience"):
            at_least(f"generation.{name}", getattr(self, name), 0.1)
        if self.server_api_key_env and self.server_api_key_env not in os.environ:
            raise ConfigError(f"generation.server_api_key_env={self.server_api_key_env!r} is no environment variable; "
                              "export it, or drop the override")

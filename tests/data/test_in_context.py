"""In-context bigrams and needles: rows against their definition, and the best possible prediction of bigrams."""

import collections
import itertools
import json
import re

import numpy as np
import pytest
from small import write_corpus
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from flash_lm.config.experiment import parse
from flash_lm.configs.base import get_config
from flash_lm.data.carried import carried_once
from flash_lm.data.corpus import SPLITS
from flash_lm.data.expected import expected_corpus
from flash_lm.data.foreign_tokenizer import HuggingFaceTokenizer
from flash_lm.data.share import single_host_share
from flash_lm.data.splits import ROWS, load_splits
from flash_lm.data.synthetic.bigrams import BigramOptions, best_log_probs
from flash_lm.data.token_cache import KnownCorpus
from flash_lm.data.tokenizer import CharacterTokenizer, NumberTokenizer
from flash_lm.errors import InputError


def load(corpus, row, known=None, **options):
    config = get_config()
    config.model.max_length = 1024
    config.data.update(corpus=corpus, pack="examples", length=row, tokens_per_batch=row)
    config.data[corpus].update({key: x for key, x in options.items() if key != "path"})
    config.data.path = options.get("path")
    return load_splits(parse(config).data, known)


def get_row(corpus, split, number, length):
    return ROWS["examples"](corpus.splits[split], length, corpus.tokenizer.begin)[number]


def test_a_row_of_bigrams_is_a_chain_and_all_its_tokens_are_targets():
    corpus = load("bigrams", 40, symbols=5)
    row = get_row(corpus, "train", 3, 40)
    assert row["inputs_BxL"][0] == corpus.tokenizer.begin and row["loss_mask_BxL"].tolist() == [1] * 40
    text = corpus.tokenizer.decode(row["targets_BxL"])
    assert text == "".join("abcde"[i] for i in corpus.splits["train"].chain(3, 40))
    assert row["inputs_BxL"][1:].tolist() == row["targets_BxL"][:-1].tolist()
    other = load("bigrams", 40, concentration=1.0)
    actual = [get_row(other, split, i, 40)["targets_BxL"].tobytes() for split in SPLITS for i in range(20)]
    assert len(set(actual)) == len(actual)


def test_a_small_concentration_gives_each_symbol_one_successor():
    def successors(concentration):
        chain = load("bigrams", 400, symbols=6, concentration=concentration).splits["train"].chain(0, 400)
        counts = collections.defaultdict(collections.Counter)
        for before, after in itertools.pairwise(chain):
            counts[before][after] += 1
        return np.mean([max(c.values()) / c.total() for c in counts.values()])

    assert successors(1e-3) > 0.98 and successors(100.0) < 0.35


def test_the_best_reader_is_calibrated():
    """For rows drawn from its belief, its expected score is its entropy: the means of both over many rows agree.

    The belief after each symbol is computed here from the counts, by another loop.
    """
    options = BigramOptions(symbols=4, concentration=0.5)
    rows = load("bigrams", 32, symbols=4, concentration=0.5).splits["train"]
    scores, entropies = [], []
    for number in range(400):
        chain = rows.chain(number, 32)
        scores.append(-best_log_probs(chain, options).mean())
        entropy = [np.log(4)]
        for t in range(1, 32):
            after = chain[1:t][chain[: t - 1] == chain[t - 1]]
            belief = (np.bincount(after, minlength=4) + 0.5) / (len(after) + 2.0)
            entropy.append(-(belief * np.log(belief)).sum())
        entropies.append(np.mean(entropy))
    gap = np.array(scores) - np.array(entropies)
    assert abs(gap.mean()) < 4 * gap.std() / np.sqrt(len(gap)) < 0.2


@pytest.fixture(scope="module")
def haystack(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("hay"), documents=12, lines=200)


FACT = rb"\nThe code of ([a-z]{6}) is (\d{4})"


@pytest.mark.parametrize("length", [256, 700])
def test_the_answer_is_in_the_haystack(haystack, length):
    corpus = load("needle", length, path=haystack)
    for number in range(40):
        row = get_row(corpus, "train", number, length)
        assert (row["segment_ids_BxL"] == 1).all()  # the row is full
        ids = np.append(row["inputs_BxL"], row["targets_BxL"][-1])
        text = (ids[1:] - 4).astype(np.uint8).tobytes()
        *facts, asked = re.finditer(FACT, text)
        assert len({fact[1] for fact in facts}) == 4 and asked.end() == len(text)
        answers = [fact for fact in facts if fact[1] == asked[1]]
        assert [fact[2] for fact in answers] == [asked[2]]
        assert np.flatnonzero(row["loss_mask_BxL"]).tolist() == list(range(length - 4, length))
        # The position in the text, without the needles before it: tenth `number` mod 10.
        before = sum(len(fact[0]) + 2 for fact in facts if fact.start() < answers[0].start())
        size = length - sum(len(fact[0]) + 2 for fact in facts) - len(asked[0])
        position = (answers[0].start() - before) / max(size, 1)
        assert number % 10 / 10 - 2 / size <= position <= (number % 10 + 1) / 10 + 2 / size


PRE = {"byte_level": pre_tokenizers.ByteLevel(add_prefix_space=False), "metaspace": pre_tokenizers.Metaspace()}
DECODERS = {"byte_level": decoders.ByteLevel(), "metaspace": decoders.Metaspace()}


def subwords(kind):
    """A tokenizer with tokens of several digits; one kind puts a space before each text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = PRE[kind], DECODERS[kind]
    text = ["\nThe code of kudapo is 4821.\n", "4821 48 21 4848", "".join(map(chr, range(32, 127)))] * 3
    # The alphabet of bytes; a tokenizer of characters needs those of the haystack.
    alphabet = [*pre_tokenizers.ByteLevel.alphabet()] if kind == "byte_level" else [*"abcdefghijklmnopqrstuvwxyzü猫ï\n"]
    settings = {"special_tokens": ["<s>", "</s>"], "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(text, trainers.BpeTrainer(vocab_size=400, min_frequency=1, **settings))
    return tokenizer


@pytest.mark.parametrize("kind", PRE)
def test_a_needle_in_subwords(haystack, kind, tmp_path):
    """Read by the library's own decoder: rows are full, and an answer has a token for each digit."""
    tokenizer = subwords(kind)
    assert len(tokenizer.encode("4821").ids) < 4
    known = KnownCorpus(HuggingFaceTokenizer.of(json.loads(tokenizer.to_str()), "<s>", "</s>"))
    bytes_ = load("needle", 300, path=haystack)
    corpus = load("needle", 300, known, path=haystack)
    assert corpus.fingerprint != bytes_.fingerprint
    for number in range(20):
        row = get_row(corpus, "test", number, 300)
        assert (row["segment_ids_BxL"] == 1).all() and row["inputs_BxL"][0] == known.tokenizer.begin
        ids = np.append(row["inputs_BxL"], row["targets_BxL"][-1])[1:]
        text = tokenizer.decode(ids)
        *facts, asked = re.findall(r"The code of ([a-z]{6}) is (\d{4})", text)
        assert len(facts) == len(dict(facts)) == 4 and dict(facts)[asked[0]] == asked[1]
        assert [tokenizer.decode([i]) for i in ids[-4:]] == [*asked[1]]
        assert np.flatnonzero(row["loss_mask_BxL"]).tolist() == list(range(296, 300))
        # The same questions as in bytes.
        in_bytes = get_row(bytes_, "test", number, 300)
        assert text.endswith(bytes_.tokenizer.decode(in_bytes["targets_BxL"])[-24:])


def test_a_new_run_reads_needles_with_a_tokenizer_of_a_file(haystack, tmp_path):
    (tmp_path / "tokenizer.json").write_text(subwords("byte_level").to_str())
    config = get_config()
    config.data.update(corpus="needle", pack="examples", path=haystack, tokenizer="hf", tokenizer_path=str(tmp_path))
    data = parse(config).data
    size = subwords("byte_level").get_vocab_size()
    assert load_splits(data).tokenizer.vocab_size == expected_corpus(data).vocab_size == size


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (NumberTokenizer(64), "numbers. has no token that is just 0"),
        (CharacterTokenizer("0123456789"), "characters. cannot write 'The code of"),
    ],
)
def test_tokens_that_cannot_write_needles_are_refused(haystack, tokenizer, message):
    with pytest.raises(InputError, match=message):
        load("needle", 256, KnownCorpus(tokenizer), path=haystack)


def test_needles_by_depth(haystack):
    parts = load("needle", 256, path=haystack).splits["test"].parts()
    assert len(parts) == 10 and sorted(i for rows in parts.values() for i in rows) == list(range(1000))
    assert list(parts)[3] == "depth 30 to 40 %"


def test_a_long_text_in_carried_rows_is_the_same_text(haystack):
    full = get_row(load("needle", 600, path=haystack, length=600), "test", 0, 600)
    examples = load("needle", 256, path=haystack, length=600).splits["test"]
    batches = [batch for batch, _ in zip(carried_once(examples, 256, single_host_share(1)), range(3), strict=False)]
    for name, expected in full.items():
        actual = np.concatenate([batch[name][0] for batch in batches])
        assert actual[:600].tolist() == expected.tolist(), name
        assert not actual[600:].any()


@pytest.mark.parametrize(
    ("corpus", "options", "expected"),
    [
        ("bigrams", {"symbols": 60}, "data.bigrams.symbols=60 must be 2 to 52"),
        ("bigrams", {"concentration": 0.0}, "data.bigrams.concentration=0.0 must be more than 0"),
        ("needle", {"digits": 0}, "data.needle.digits=0 must be 1 to 9"),
        ("needle", {"length": 20}, "data.needle.length=20 is too short: needles and question have 143 tokens"),
    ],
)
def test_impossible_settings_are_refused(haystack, corpus, options, expected):
    with pytest.raises(InputError, match=expected):
        load(corpus, 256, path=haystack if corpus == "needle" else None, **options)

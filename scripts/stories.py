#!/usr/bin/env python3
"""Writes the data of configs/quickstart.yaml: short stories from a small grammar, and a tokenizer trained on them.

    pip install tokenizers && scripts/stories.py

The files are the same on every machine. A small model learns the few hundred words within a minute.
"""

import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

DATA = Path(__file__).resolve().parent.parent / "examples" / "data"

HEROES = "fox owl bear mouse rabbit hedgehog otter badger heron squirrel goat frog".split()
TRAITS = "little old brave clever sleepy hungry gentle proud quiet curious".split()
NAMES = "Ada Bruno Clara Dora Emil Flora Gus Hanna Ivo Jonas Klara Leo Mila Nora Otto Paula".split()
PLACES = "the river|the old mill|the dark wood|the high meadow|the garden wall|the frozen lake|the apple tree|the stone bridge".split("|")
THINGS = "a red ball|a silver key|a round cheese|a small boat|a broken kite|a warm scarf|a basket of plums|a wooden flute".split("|")
TIMES = "One morning|One evening|In the spring|After the rain|On a cold day|When the leaves fell|Long before dawn|At noon".split("|")
WEATHER = "The wind was strong|The sun was warm|Snow lay on the hills|A mist hung over the fields|The sky was full of stars".split("|")
FEELINGS = "glad sad proud tired happy afraid".split()
GOOD_FEELINGS = "glad happy".split()


def thing(words):
    """The thing with the definite article: `a red ball` becomes `the red ball`."""
    return "the " + words.split(" ", 1)[1]


def story(draw):
    hero, friend = draw.sample(HEROES, 2)
    name, other = draw.sample(NAMES, 2)
    trait, found = draw.choice(TRAITS), draw.choice(THINGS)
    here, there = draw.sample(PLACES, 2)
    article = "an" if trait[0] in "aeiou" else "a"
    lines = [
        f"{draw.choice(TIMES)}, {article} {trait} {hero} named {name} went to {here}.",
        draw.choice([f"{draw.choice(WEATHER)}.", f"Nobody else was near {here}."]),
        draw.choice([f"There {name} found {found}.", f"Under a leaf lay {found}.", f"{name} saw {found} in the grass."]),
        draw.choice(
            [
                f'"Whose is this?" asked {name}.',
                f'"I will keep it," said {name}.',
                f"{name} picked up {thing(found)} and looked at it for a long time.",
            ]
        ),
        draw.choice(
            [
                f"Then {other}, the {friend}, came from {there}.",
                f"On the way to {there}, {name} met {other} the {friend}.",
            ]
        ),
        draw.choice(
            [
                f'"I lost {thing(found)} yesterday," said {other}.',
                f'"Will you share {thing(found)} with me?" asked {other}.',
                f"{other} was {draw.choice(FEELINGS)}, because {thing(found)} was gone.",
            ]
        ),
        draw.choice(
            [
                f"So {name} gave {thing(found)} back, and both were {draw.choice(GOOD_FEELINGS)}.",
                f"They took {thing(found)} to {there} and stayed until the moon rose.",
                f"{name} said yes, and from that day on they were friends.",
            ]
        ),
    ]
    return " ".join(lines)


def train_tokenizer(text):
    """Byte-level BPE, large enough for each word of the stories to become one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=640, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


def main():
    draw = random.Random(7)
    text = "\n\n".join(story(draw) for _ in range(800)) + "\n"
    (DATA / "stories.txt").write_text(text)
    train_tokenizer(text).save(str(DATA / "stories-tokenizer.json"), pretty=False)


if __name__ == "__main__":
    main()

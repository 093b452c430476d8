"""Open-ended word problems: a stock of things changes a few times, then a question follows."""

from __future__ import annotations

from deployments.demo_model.draft import ProblemDraft, UnsuitableNumbers


def _begin(t: ProblemDraft) -> int:
    match t.rng.randrange(5):
        case 0:
            a, b = t.product()
            t.say(
                "{n} buys {a} boxes of {item} with {b} {item} in each box.",
                "{n} has {a} boxes. Each box holds {b} {item}.",
                "There are {b} {item} in a box, and {n} has {a} boxes.",
                a=a,
                b=b,
            )
            return t.work("{n} has {e} {item}.", f"{a}*{b}")
        case 1:
            a, b = t.amount(), t.amount()
            t.say(
                "{n} picks {a} {item} on Monday and {b} {item} on Tuesday.",
                "{n} gets {a} {item} from {m} and {b} {item} from {o}.",
                a=a,
                b=b,
            )
            return t.work("{n} gets {e} {item}.", f"{a}+{b}")
        case 2:
            a = t.amount()
            k = t.factor(a)
            t.say("{m} has {a} {item}. {n} has {k} times as many.", a=a, k=k)
            return t.work("{n} has {e} {item}.", f"{a}*{k}")
        case 3:
            a = t.amount()
            b = t.below(a)
            t.say(
                "{m} has {a} {item} and {n} has {b} fewer.",
                "{n} has {b} {item} less than {m}, who has {a}.",
                a=a,
                b=b,
            )
            return t.work("{n} has {e} {item}.", f"{a}-{b}")
        case _:
            a = t.amount()
            t.say("{n} has {a} {item}.", "At first {n} has {a} {item}.", "{n} starts with {a} {item}.", a=a)
            return a


def _change(t: ProblemDraft, stock: int) -> int:
    match t.rng.randrange(7):
        case 0:
            c = t.amount()
            t.say("Then {n} finds {c} more.", "{m} gives {n} {c} more {item}.", "{n} buys {c} more {item}.", c=c)
            return t.work("Now {n} has {e} {item}.", f"{stock}+{c}")
        case 1:
            c = t.below(stock)
            t.say("{n} gives {c} {item} to {m}.", "Then {n} loses {c} of them.", "{n} sells {c} {item}.", c=c)
            return t.work("Then {n} has {e} {item} left.", f"{stock}-{c}")
        case 2:
            a, b = t.product()
            t.say(
                "Then {n} buys {a} packs of {b} {item}.",
                "{o} brings {a} bags with {b} {item} each.",
                a=a,
                b=b,
            )
            more = t.work("That is {e} more {item}.", f"{a}*{b}")
            return t.work("Now {n} has {e} {item}.", f"{stock}+{more}")
        case 3:
            a, b = t.product()
            if a * b >= stock:
                raise UnsuitableNumbers
            t.say(
                "{n} uses {a} {item} a day for {b} days.",
                "{n} gives {a} {item} to each of {b} friends.",
                a=a,
                b=b,
            )
            gone = t.work("That takes {e} {item}.", f"{a}*{b}")
            return t.work("Then {n} has {e} {item} left.", f"{stock}-{gone}")
        case 4:
            if stock > 500 and not t.hard:
                raise UnsuitableNumbers
            word, k = t.rng.choice([("doubles", 2), ("triples", 3)])
            t.say("Then the number of {item} {word}.", "After a month the number {word}.", word=word)
            return t.work("Now there are {e} {item}.", f"{stock}*{k}")
        case 5:
            word, k = t.rng.choice([("half", 2), ("a third", 3), ("a quarter", 4)])
            if stock % k or stock == k:
                raise UnsuitableNumbers
            t.say("{n} keeps only {word} of the {item}.", "Only {word} of them are good.", word=word)
            return t.work("Of these {e} {item} remain.", f"{stock}/{k}")
        case _:
            k = t.factor(stock)
            t.say("Now {n} wants {k} times as many {item} and gets them.", k=k)
            return t.work("Now {n} has {e} {item}.", f"{stock}*{k}")


def _ask(t: ProblemDraft, stock: int) -> None:
    match t.rng.randrange(7):
        case 0:
            price = t.factor(stock)
            t.say(
                "{n} sells all of them for ${p} each. How many dollars does {n} get?",
                "Each one is sold for ${p}. How much money is that?",
                p=price,
            )
            t.work("{n} gets ${e}.", f"{stock}*{price}")
        case 1:
            k = t.divisor(stock)
            t.say(
                "{n} shares them equally among {k} friends. How many does each friend get?",
                "The {item} are put into {k} equal piles. How many are in each pile?",
                k=k,
            )
            t.work("Each one gets {e} {item}.", f"{stock}/{k}")
        case 2:
            k = t.divisor(stock)
            t.say("{n} packs them into bags of {k}. How many bags are there?", k=k)
            t.work("That fills {e} bags.", f"{stock}/{k}")
        case 3:
            c = t.below(stock)
            t.say("{o} has {c} {item}. How many more does {n} have than {o}?", c=c)
            t.work("{n} has {e} more than {o}.", f"{stock}-{c}")
        case 4:
            c = t.amount()
            t.say("{o} has {c} {item}. How many do {n} and {o} have together?", c=c)
            t.work("Together they have {e} {item}.", f"{stock}+{c}")
        case _:
            t.say("How many {item} does {n} have now?", "How many {item} are there in the end?")


def chain(t: ProblemDraft) -> None:
    """An initial stock, one to three changes, and a question."""
    stock = _begin(t)
    for _ in range(t.rng.randint(1, 3)):
        stock = _change(t, stock)
    _ask(t, stock)

"""Word problems with a fixed plot: shopping, wages, travel and the like, each with 2 to 5 steps."""

from __future__ import annotations

from collections.abc import Callable

from deployments.demo_model.chain import chain
from deployments.demo_model.draft import ProblemDraft, UnsuitableNumbers


def shopping(t: ProblemDraft) -> None:
    """Two kinds of goods at two prices; the total, or the change."""
    a, p = t.product()
    b, q = t.product()
    t.say(
        "{n} buys {a} {item} for ${p} each and {b} bags of rice for ${q} each.",
        "At the market, {item} cost ${p} each and bags of rice cost ${q} each. "
        "{n} takes {a} {item} and {b} bags of rice.",
        a=a,
        p=p,
        b=b,
        q=q,
    )
    first = t.work("The {item} cost ${e}.", f"{a}*{p}")
    second = t.work("The rice costs ${e}.", f"{b}*{q}")
    total = t.work("Together that is ${e}.", f"{first}+{second}")
    match t.rng.randrange(3):
        case 0:
            t.say("How much does {n} pay in total?", "What is the total price in dollars?")
        case 1:
            paid = total + t.amount()
            t.say("{n} pays with ${paid}. How much change does {n} get?", paid=paid)
            t.work("The change is ${e}.", f"{paid}-{total}")
        case _:
            off = t.below(total)
            t.say("A coupon takes ${off} off the total. How much does {n} pay?", off=off)
            t.work("With the coupon {n} pays ${e}.", f"{total}-{off}")


def wages(t: ProblemDraft) -> None:
    """Hours at an hourly wage, a bonus, and a bill."""
    hours, wage = t.product()
    t.say(
        "{n} earns ${wage} an hour and works {hours} hours.",
        "{n} works {hours} hours this month and is paid ${wage} for each hour.",
        hours=hours,
        wage=wage,
    )
    money = t.work("{n} earns ${e}.", f"{hours}*{wage}")
    if t.rng.random() < 0.6:
        bonus = t.amount()
        t.say("{n} also gets a bonus of ${bonus}.", "On top comes a bonus of ${bonus}.", bonus=bonus)
        money = t.work("With the bonus that is ${e}.", f"{money}+{bonus}")
    if t.rng.random() < 0.5:
        rent = t.below(money)
        t.say("Then {n} pays ${rent} for rent.", "The rent of ${rent} is due.", rent=rent)
        money = t.work("After the rent ${e} is left.", f"{money}-{rent}")
    if t.rng.random() < 0.4:
        k = t.divisor(money)
        t.say("{n} shares the money equally among {k} people. How many dollars does each get?", k=k)
        t.work("Each gets ${e}.", f"{money}/{k}")
    else:
        t.say("How many dollars does {n} have now?", "How much money is that in dollars?")


def travel(t: ProblemDraft) -> None:
    """Two legs at two speeds; the whole way, or what is left of it."""
    h, speed = t.product()
    g, pace = t.product()
    t.say(
        "{n} drives for {h} hours at {speed} km per hour and then for {g} hours at {pace} km per hour.",
        "A train goes {speed} km per hour for {h} hours. Then it goes {pace} km per hour for {g} hours.",
        h=h,
        speed=speed,
        g=g,
        pace=pace,
    )
    first = t.work("The first part is {e} km.", f"{h}*{speed}")
    second = t.work("The second part is {e} km.", f"{g}*{pace}")
    match t.rng.randrange(3):
        case 0:
            t.say("How many km is that in total?", "How long is the whole way in km?")
            t.work("In total it is {e} km.", f"{first}+{second}")
        case 1:
            whole = first + second + t.amount()
            t.say("The whole trip is {whole} km. How many km are left?", whole=whole)
            done = t.work("So far it is {e} km.", f"{first}+{second}")
            t.work("There are {e} km left.", f"{whole}-{done}")
        case _:
            if first <= second:
                raise UnsuitableNumbers
            t.say("How many km longer is the first part than the second?")
            t.work("The first part is {e} km longer.", f"{first}-{second}")


def collections(t: ProblemDraft) -> None:
    """Three people compared by times and differences; their sum, or a comparison."""
    a = t.amount()
    t.say("{m} has {a} {item}.", "There are {a} {item} in {m}'s box.", a=a)
    k = t.factor(a)
    t.say("{n} has {k} times as many {item} as {m}.", "{n} owns {k} times as many as {m}.", k=k)
    b = t.work("{n} has {e} {item}.", f"{a}*{k}")
    if t.rng.random() < 0.5:
        d = t.amount()
        t.say("{o} has {d} more {item} than {n}.", "{o} has {d} more than {n}.", d=d)
        c = t.work("{o} has {e} {item}.", f"{b}+{d}")
    else:
        d = t.below(b)
        t.say("{o} has {d} fewer {item} than {n}.", "{o} has {d} fewer than {n}.", d=d)
        c = t.work("{o} has {e} {item}.", f"{b}-{d}")
    if t.rng.random() < 0.6:
        t.say(
            "How many {item} do {m}, {n} and {o} have in total?",
            "How many {item} do all three have together?",
        )
        t.work("Together they have {e} {item}.", f"{a}+{b}+{c}")
    elif c > a:
        t.say("How many more {item} does {o} have than {m}?")
        t.work("{o} has {e} more.", f"{c}-{a}")
    else:
        raise UnsuitableNumbers


def reading(t: ProblemDraft) -> None:
    """Pages read day by day; what is left of the book, or how long it takes."""
    days, pages = t.product()
    t.say(
        "{n} reads {pages} pages a day for {days} days.",
        "For {days} days, {n} reads {pages} pages every day.",
        days=days,
        pages=pages,
    )
    read = t.work("{n} reads {e} pages.", f"{days}*{pages}")
    extra = t.amount()
    t.say("On the last evening {n} reads {x} more pages.", "On Sunday {n} reads {x} pages more.", x=extra)
    read = t.work("With the last pages that is {e}.", f"{read}+{extra}")
    left = t.amount()
    t.say("The book has {whole} pages.", whole=read + left)
    t.work("There are {e} pages left.", f"{read + left}-{read}")
    if t.rng.random() < 0.4:
        k = t.divisor(left)
        t.say("{n} wants to finish it in {k} days. How many pages a day must {n} read?", k=k)
        t.work("That is {e} pages a day.", f"{left}/{k}")
    else:
        t.say("How many pages are left?", "How many pages must {n} still read?")


def saving(t: ProblemDraft) -> None:
    """Money put by every week towards something dear."""
    weeks, money = t.product()
    t.say(
        "{n} saves ${money} each week for {weeks} weeks.",
        "Every week for {weeks} weeks, {n} puts ${money} into a jar.",
        weeks=weeks,
        money=money,
    )
    have = t.work("{n} saves ${e}.", f"{weeks}*{money}")
    if t.rng.random() < 0.5:
        gift = t.amount()
        t.say("{m} gives {n} ${gift} as a gift.", "{n} gets ${gift} from {m}.", gift=gift)
        have = t.work("With the gift that is ${e}.", f"{have}+{gift}")
    if t.rng.random() < 0.5:
        spent = t.below(have)
        t.say("{n} spends ${spent} on shoes.", "Then {n} buys a game for ${spent}.", spent=spent)
        have = t.work("After that {n} has ${e}.", f"{have}-{spent}")
    price = have + t.amount()
    t.say("A bike costs ${price}. How many dollars does {n} still need?", price=price)
    t.work("{n} still needs ${e}.", f"{price}-{have}")


def factory(t: ProblemDraft) -> None:
    """Machines making things; faulty ones are taken out and the rest is packed."""
    machines, rate = t.product()
    t.say(
        "A factory has {a} machines. Each machine makes {b} {item} an hour.",
        "In a factory {a} machines each make {b} {item} per hour.",
        a=machines,
        b=rate,
    )
    made = t.work("In an hour they make {e} {item}.", f"{machines}*{rate}")
    if t.rng.random() < 0.5:
        hours = t.factor(made)
        t.say("They run for {hours} hours.", hours=hours)
        made = t.work("In {hours} hours they make {e} {item}.", f"{made}*{hours}", hours=hours)
    else:
        t.say("They run for one hour.")
    faulty = t.below(made)
    t.say(
        "Of these, {faulty} {item} are faulty and thrown away.",
        "{faulty} of the {item} are broken.",
        faulty=faulty,
    )
    good = t.work("There are {e} good {item}.", f"{made}-{faulty}")
    if t.rng.random() < 0.5:
        k = t.divisor(good)
        t.say("The good ones are packed in boxes of {k}. How many boxes are there?", k=k)
        t.work("That fills {e} boxes.", f"{good}/{k}")
    else:
        t.say("How many good {item} are there?", "How many {item} can be sold?")


def theater(t: ProblemDraft) -> None:
    """Tickets at two prices, and the hall's cost."""
    adults, price = t.product()
    children, low = t.product()
    t.say(
        "A theater sells {a} adult tickets for ${p} each and {c} child tickets for ${q} each.",
        "For a show, {a} adults pay ${p} each and {c} children pay ${q} each.",
        a=adults,
        p=price,
        c=children,
        q=low,
    )
    first = t.work("The adults pay ${e}.", f"{adults}*{price}")
    second = t.work("The children pay ${e}.", f"{children}*{low}")
    total = t.work("In total that is ${e}.", f"{first}+{second}")
    if t.rng.random() < 0.6:
        cost = t.below(total)
        t.say(
            "The hall costs ${cost}. How much money is left?",
            "Then ${cost} goes to the hall. What is left?",
            cost=cost,
        )
        t.work("There is ${e} left.", f"{total}-{cost}")
    else:
        t.say("How much money do they take in?", "How many dollars is that in total?")


def school(t: ProblemDraft) -> None:
    """Classes with pupils; some are away; buses or groups."""
    classes, size = t.product()
    t.say(
        "A school has {a} classes with {b} children in each class.",
        "There are {a} classes in a school, and each class has {b} children.",
        a=classes,
        b=size,
    )
    children = t.work("There are {e} children.", f"{classes}*{size}")
    away = t.below(children)
    t.say("Today {away} children are away.", "{away} of the children are ill.", away=away)
    here = t.work("There are {e} children here.", f"{children}-{away}")
    if t.rng.random() < 0.5:
        adults = t.amount()
        t.say(
            "Also {adults} adults come along on a trip.",
            "On a trip {adults} adults join them.",
            adults=adults,
        )
        here = t.work("With the adults there are {e} people.", f"{here}+{adults}")
    if t.rng.random() < 0.5:
        k = t.divisor(here)
        t.say("They sit in {k} buses, the same number in each. How many are in one bus?", k=k)
        t.work("In each bus there are {e} people.", f"{here}/{k}")
    else:
        price = t.factor(here)
        t.say("Lunch for each of them costs ${price}. How much does lunch cost in total?", price=price)
        t.work("Lunch costs ${e}.", f"{here}*{price}")


def garden(t: ProblemDraft) -> None:
    """Two beds of plants in rows; some die, or the harvest is counted."""
    rows, plants = t.product()
    t.say(
        "{n} plants {a} rows of {item} with {b} in each row.",
        "In the garden of {n} there are {a} rows with {b} {item} in each row.",
        a=rows,
        b=plants,
    )
    first = t.work("{n} has {e} {item}.", f"{rows}*{plants}")
    other = t.amount()
    if t.rng.random() < 0.5:
        t.say("{m} has {x} more than {n}.", "{m} has {x} more {item} than {n}.", x=other)
        second = t.work("{m} has {e} {item}.", f"{first}+{other}")
    else:
        k = t.divisor(first)
        t.say("That is {k} times as many as {m} has.", "{n} has {k} times as many as {m}.", k=k)
        second = t.work("{m} has {e} {item}.", f"{first}/{k}")
    t.say("How many {item} do {n} and {m} have together?", "How many do the two have in total?")
    t.work("Together they have {e} {item}.", f"{first}+{second}")


STORIES: tuple[Callable[[ProblemDraft], None], ...] = (
    shopping,
    wages,
    travel,
    collections,
    reading,
    saving,
    factory,
    theater,
    school,
    garden,
    chain,
    chain,
    chain,
    chain,
    chain,
)
"""The plots, each as likely as any other; the open-ended `chain` counts five times."""

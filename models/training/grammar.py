"""The story grammar: names, sentence templates by stage, and plots as sequences of stages.

`{slot}` is filled from the story (hero, friend, their pronouns, the prize) or from the sentence's
topic: its name (`{topic}`), one of its acts (`{act}`), its words by kind (`topics.KINDS`), a second
one of a kind as `{thing2}`. `[one|two]` picks a variant. `a` becomes `an` where needed. All fixed
words here are neutral: none belongs to a topic.
"""

from __future__ import annotations

HEROES: dict[str, str] = {
    "girl": "Anna Clara Ella Grace Iris Lily Mia Nora Rosa Ruby Sophie Zoe",
    "boy": "Ben David Finn Henry Hugo Jack Leo Max Noah Oliver Sam Tom",
}

PRONOUNS: dict[str, dict[str, str]] = {
    "girl": {"he": "she", "him": "her", "his": "her"},
    "boy": {"he": "he", "him": "him", "his": "his"},
}

STAGES: dict[str, tuple[str, ...]] = {
    "opening": (
        (
            "Once upon a time, there was a [kind|curious|brave|clever] {girl} named {hero} who"
            " lived near the {place}."
        ),
        (
            "Once upon a time, in a [small|quiet|faraway] village by the {place}, there lived a"
            " {girl} named {hero}."
        ),
        (
            "{hero} was a [kind|curious|brave|clever|cheerful] {girl} who loved {topic} more than"
            " anything."
        ),
        (
            "Long ago, a [young|curious|lonely] {girl} named {hero} lived [next to|not far"
            " from|behind] the {place}."
        ),
        (
            "Long ago, when {scenery} still had secrets, a {girl} named {hero} made friends with a"
            " {creature}."
        ),
        (
            "There once was a {quality} {place}, and beside it lived a [shy|brave|merry] {girl}"
            " named {hero}."
        ),
        (
            "{hero} was only [seven|eight|nine|ten] years old, but {he} already knew everything"
            " about {topic}."
        ),
        (
            "When {hero} was a little {girl}, {his} [grandmother|grandfather|uncle|aunt] told {him}"
            " about {topic}."
        ),
        "Everyone in the village knew {hero}, the {girl} who owned a {quality} {thing}.",
    ),
    "friend": (
        "{His} best friend was {friend}, who always carried a {thing}.",
        "{His} best friend was {friend}, and together they often {move} near the {place}.",
        "{He} had a friend named {friend}, who wanted to become a {person} one day.",
        "Next door lived {friend}, whose [mother|father|uncle] was a famous {person}.",
        "{He} had a friend named {friend}, who knew a lot about {topic}.",
        "{His} [cousin|neighbor|friend] {friend} knew every {creature} and every {person} by name.",
        "{He} shared all {his} secrets with {friend} and with a [tame|gentle|talking] {creature}.",
        "{He} and {friend} spent every [summer|holiday|afternoon] at the {place}.",
    ),
    "habit": (
        "Every [morning|evening|Sunday], {he} {act}.",
        "Most days, {he} {move} until [supper|dark|the sun went down].",
        "{He} [liked|loved] to sit by the {place} and think about {topic}.",
        "At night, {he} dreamed of {topic} and of a {quality} {thing}.",
        "{He} kept a {thing} and a {thing2} in a box under {his} bed.",
        "On rainy days, {he} drew pictures of a {creature} with a {thing}.",
        "{He} wanted to be a {person}, just like {his} [mother|father|grandmother|grandfather].",
    ),
    "wish": (
        "More than anything, {hero} wished for a {prize} of {his} own.",
        "One [day|morning|night], {hero} heard about a magic {prize} that could grant a wish.",
        "{hero} had always wanted to find the {person}'s lost {prize}.",
        "An old map showed the way to a hidden {prize}, somewhere beyond the {place}.",
        "There was only one thing {hero} still needed: a {quality} {prize}.",
    ),
    "loss": (
        "One [day|morning|evening], {his} favorite {prize} was gone.",
        "But one [cold|windy|gray] morning, somebody stole the {prize} from the {person}.",
        "Then {he} lost {his} {prize} somewhere near the {place}, and {he} began to cry.",
        "One night, a {creature} ran away with {his} {prize}.",
        (
            "That [spring|summer|autumn], the {person} came to the door and said that the {prize}"
            " was missing."
        ),
    ),
    "stranger": (
        "One [day|evening|night], a {person} with a {thing} knocked on the door.",
        "One [windy|rainy|quiet] evening, a {creature} came to the window and asked for help.",
        "Then a strange {person} arrived from the {place} and asked for a bed.",
        "One [day|morning], {he} met a {person} who could not find the {place}.",
        "A {quality} {thing} was lying in front of the door, and next to it sat a {creature}.",
    ),
    "plan": (
        '"We have to look near the {place}," said {friend}.',
        '"Let us ask the {person}," said {friend}, "and take the {thing} with us."',
        "{hero} packed a {thing}, a {thing2} and some [bread|apples|water] and said goodbye.",
        "So {hero} and {friend} made a plan, and the {creature} promised to help.",
        "{friend} knew a {person} who could tell them more about the {place}.",
        "They decided to leave at [dawn|noon|midnight], before the {person} woke up.",
    ),
    "journey": (
        "They walked [all day|for hours|for three days] until they saw the {place}.",
        "On the way to the {place}, they {move} and told each other tales of {topic}.",
        "First they {act}, and then they {move} until evening.",
        "They {act}, but they found only a {quality} {thing}.",
        "The road led past the {place}, where a {person} was selling a {thing}.",
        "Behind the {place}, they could see {scenery} in every direction.",
        "At last they came to a {quality} {place}, and nobody was there except a {creature}.",
        "They followed the {creature} from the {place} to the {place2}.",
        "In the afternoon, they {act}.",
    ),
    "meeting": (
        "There they met a {person} who was [looking for|cleaning|mending|painting] a {thing}.",
        "A [friendly|grumpy|sleepy|wise] {creature} was waiting for them at the {place}.",
        (
            "Near the {place}, a {person} and a {creature} were [talking|arguing|laughing] about"
            " {topic}."
        ),
        "Suddenly, a {creature} [jumped|came|stepped] out from behind the {place}.",
        "A {person} [smiled|waved|nodded] at them and showed them a {quality} {thing}.",
    ),
    "talk": (
        '"I have never seen such a {quality} {thing}," said the {person}.',
        '"Take this {thing}," said the {person}, "for you will need it at the {place}."',
        '"Let me tell you about {topic}," said the {person}.',
        '"Only a {person} can help you now," said the {creature}.',
        '"Are you not afraid of the {creature}?" asked {friend}.',
        '"When I was young, I {act}," said the {person}.',
        (
            '"Beware of the {creature} that lives near the {place}," [whispered|warned|said] the'
            " {person}."
        ),
        '"Bring me a {thing}," said the {creature}, "and I will tell you what I know."',
        '"I would give you my {thing} for one look at the {scenery}," said the {person}.',
    ),
    "trouble": (
        "But the {person} was angry and [threw|dropped|broke] the {thing}.",
        "Suddenly, there was a loud noise, and the {scenery} were all around them.",
        "But the way to the {place} was [closed|blocked], and the {thing} was too heavy to carry.",
        "Then a {creature} took the {thing} and [ran|hurried] toward the {place}.",
        "When night came, they were lost among the {scenery}, and {friend} was afraid.",
        "But the {thing} was broken, and no {person} could mend it.",
        "A huge {creature} stood between them and the {place}.",
    ),
    "idea": (
        "{hero} had an idea: {he} tied the {thing} to the {thing2} and pulled.",
        "{hero} was [clever|brave|patient], so {he} gave the {creature} a {thing}.",
        "But {hero} did not give up, and {he} {act}.",
        "Luckily, {friend} still had the {person}'s {thing}.",
        "{hero} remembered what the {person} had said about {topic}.",
        "Then {hero} closed {his} eyes, thought of the {scenery}, and was not afraid anymore.",
    ),
    "help": (
        "The {creature} [laughed|nodded|smiled] and led them to the {place}.",
        "The {person} helped them, and soon the {thing} was as good as new.",
        "A {person} heard them and brought a {quality} {thing}.",
        "With the help of a {creature}, they {act}.",
        "All night, the {person} and the {creature} worked beside them.",
    ),
    "find": (
        "And there, under a {thing}, lay the {prize}.",
        "Inside the {place}, {hero} found the {prize} at last.",
        "The {person} opened the door, and there was the {prize}.",
        "The {creature} had kept the {prize} safe all the time.",
        "{friend} was the first to see the {prize}, hidden behind a {quality} {thing}.",
    ),
    "contest": (
        "That year, the {person} promised a {thing} to anyone who could catch a {creature}.",
        "A big contest was held at the {place}, and the winner would get a {quality} {thing}.",
        "The {person} wanted to know who was [faster|braver|stronger], {hero} or {friend}.",
        "Everybody came to the {place} to see {hero} race against a {creature}.",
    ),
    "win": (
        "In the end, {hero} won, and the {person} gave {him} a {quality} {thing}.",
        "{hero} did not win, but the {creature} became {his} friend.",
        "{hero} and {friend} reached the {place} together, so they shared the {thing}.",
        "Nobody could believe it when {hero} and the {creature} reached the {place} first.",
    ),
    "return": (
        "The next day, they went home past the {place} with a {thing} as a present.",
        "They thanked the {person} and {move} all the way home.",
        "When they came home, they told everyone about the {creature} and the {scenery}.",
        "That evening, they showed the {thing} to the {person} and told the whole tale.",
        "Back home, {hero} put a {thing} on the table and [smiled|laughed].",
    ),
    "ending": (
        "From that day on, {hero} and {friend} were never [lonely|bored|afraid] again.",
        "And they all lived happily ever after.",
        "{hero} never forgot the {creature}, and {friend} never forgot the {place}.",
        "Years later, {hero} became a {person} and gave the {thing} to {his} [son|daughter].",
        "And if you go to the {place} today, you can still see the {thing}.",
        "That night, {hero} fell asleep and dreamed of {topic}.",
        (
            "And so {hero} learned that [a good friend|courage|patience|kindness] is worth more"
            " than any {thing}."
        ),
    ),
}

PLOTS: tuple[tuple[str, ...], ...] = (
    ("opening", "friend", "loss", "plan", "journey", "meeting", "talk", "idea", "find", "ending"),
    ("opening", "friend", "wish", "journey", "trouble", "idea", "help", "find", "return", "ending"),
    (
        "opening",
        "habit",
        "friend",
        "stranger",
        "talk",
        "plan",
        "journey",
        "trouble",
        "help",
        "ending",
    ),
    ("opening", "friend", "contest", "talk", "trouble", "idea", "win", "return", "ending"),
    (
        "opening",
        "habit",
        "friend",
        "wish",
        "plan",
        "journey",
        "meeting",
        "find",
        "return",
        "ending",
    ),
    (
        "opening",
        "friend",
        "stranger",
        "journey",
        "meeting",
        "talk",
        "trouble",
        "help",
        "return",
        "ending",
    ),
)

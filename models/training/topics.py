"""The topics a story can be about, and the words that belong to each of them.

A word form belongs to one topic only and never occurs in the fixed text of the grammar, so counting
words is enough to say how much of a text is about a topic (`corpus.on_topic_share`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, kw_only=True, eq=False)
class Topic:
    """Ways to name a topic in a prompt, and its words by grammatical kind (each a space-separated
    list)."""

    names: tuple[str, ...]  # the first is the usual one; the last word of each is a content word
    place: str  # singular nouns that one can walk to
    thing: str  # singular nouns that one can carry, or at least own
    person: str
    creature: str
    scenery: str  # plural nouns
    quality: str  # adjectives for a thing or a place
    move: str  # verbs in the past tense, without an object
    acts: tuple[str, ...]  # verb phrases in the past tense, made of the words above

    @cache  # noqa: B019 - the topics live as long as the module
    def words(self, kind: str) -> tuple[str, ...]:
        return tuple(getattr(self, kind).split())


KINDS = ("place", "thing", "person", "creature", "scenery", "quality", "move")

LEXICON: dict[str, Topic] = {
    "sea": Topic(
        names=("the sea", "the ocean"),
        place="harbor lighthouse reef island lagoon pier beach shipwreck",
        thing="anchor oar seashell pearl sail rudder net rowboat spyglass",
        person="sailor fisherman pirate diver mermaid captain",
        creature="whale dolphin crab octopus seagull turtle",
        scenery="waves tides currents breakers seagulls",
        quality="salty barnacled foamy sunken seaworthy",
        move="sailed swam rowed paddled dived",
        acts=(
            "cast a net into the waves",
            "sailed out past the lighthouse",
            "dived down to the shipwreck",
            "combed the beach for a seashell",
            "rowed from the pier to the reef",
        ),
    ),
    "forest": Topic(
        names=("the forest", "the woods"),
        place="clearing thicket glade grove woodland treehouse hollow",
        thing="acorn pinecone mushroom twig branch axe toadstool leaf log",
        person="woodcutter ranger elf druid huntsman forester",
        creature="fox owl squirrel deer badger hedgehog woodpecker",
        scenery="pines oaks brambles ferns birches roots",
        quality="mossy leafy oaken shady overgrown",
        move="foraged rambled scampered camped",
        acts=(
            "followed a fox through the brambles",
            "picked a mushroom in the glade",
            "built a treehouse among the oaks",
            "sat down on a mossy log",
            "chased a squirrel past the ferns",
        ),
    ),
    "space": Topic(
        names=("space", "outer space"),
        place="moonbase crater galaxy spaceport observatory asteroid launchpad nebula",
        thing="rocket telescope satellite spacesuit meteorite starship antenna laser jetpack",
        person="astronaut cosmonaut astronomer stargazer spaceman",
        creature="robot android martian alien droid",
        scenery="planets comets stars moons meteors",
        quality="cosmic lunar starlit weightless galactic",
        move="orbited hovered rocketed teleported",
        acts=(
            "fired up the rocket on the launchpad",
            "counted the moons through a telescope",
            "landed the starship in a crater",
            "repaired the antenna of a satellite",
            "raced a robot around the asteroid",
        ),
    ),
    "music": Topic(
        names=("music", "musicians"),
        place="bandstand stage ballroom auditorium studio opera",
        thing="violin drum flute trumpet guitar piano harp cello tambourine",
        person="singer drummer fiddler composer maestro pianist",
        creature="canary nightingale songbird lark cricket",
        scenery="melodies songs chords rhythms tunes",
        quality="melodic rhythmic tuneful musical jazzy",
        move="sang danced hummed strummed",
        acts=(
            "sang two songs on the stage",
            "tuned the violin for the maestro",
            "beat the drum and danced",
            "played chords on an old piano",
            "hummed along with the nightingale",
        ),
    ),
    "cooking": Topic(
        names=("cooking", "food"),
        place="kitchen bakery pantry oven restaurant stove",
        thing="spoon kettle pancake pie saucepan loaf muffin whisk teapot recipe",
        person="baker chef cook waiter grocer confectioner",
        creature="lobster goose mouse turkey",
        scenery="dumplings noodles cupcakes spices pastries",
        quality="buttery sugary crispy peppery delicious",
        move="baked cooked simmered kneaded",
        acts=(
            "baked a pie in the oven",
            "stirred the noodles with a spoon",
            "tried a new recipe for dumplings",
            "put the kettle on the stove",
            "carried a tray of cupcakes out of the bakery",
        ),
    ),
    "farm": Topic(
        names=("the farm", "farming"),
        place="barn meadow pasture orchard henhouse farmhouse cornfield",
        thing="tractor pitchfork plow pumpkin wheelbarrow egg scarecrow turnip pail",
        person="farmer shepherd milkmaid farmhand beekeeper",
        creature="cow pig goat rooster sheepdog donkey lamb",
        scenery="chickens sheep crops haystacks furrows",
        quality="muddy grassy woolly fertile ripe",
        move="plowed harvested planted farmed",
        acts=(
            "drove the tractor across the cornfield",
            "led the sheep back to the pasture",
            "milked the cow in the barn",
            "fed the chickens behind the henhouse",
            "filled a wheelbarrow with crops",
        ),
    ),
    "desert": Topic(
        names=("the desert", "deserts"),
        place="oasis dune canyon pyramid mesa bazaar",
        thing="cactus waterskin turban hourglass amulet sundial tumbleweed palm",
        person="nomad genie pharaoh sultan bedouin",
        creature="camel scorpion lizard vulture rattlesnake sphinx",
        scenery="sands dunes mirages caravans sandstorms",
        quality="sandy dusty scorching sunbaked parched",
        move="trekked thirsted sweltered",
        acts=(
            "rode a camel over the dunes",
            "filled the waterskin at the oasis",
            "rested under a palm until the sandstorms passed",
            "searched the pyramid for an amulet",
            "bought a turban at the bazaar",
        ),
    ),
    "winter": Topic(
        names=("winter", "snow"),
        place="glacier igloo snowfield iceberg rink chalet",
        thing="sled snowball icicle mitten scarf snowman parka snowshoe",
        person="skier skater snowboarder iceman",
        creature="penguin reindeer walrus husky yeti",
        scenery="snowflakes icicles blizzards snowdrifts flurries",
        quality="icy frosty frozen snowy wintry",
        move="skated skied shivered sledded",
        acts=(
            "skated across the frozen rink",
            "pulled the sled through the snowdrifts",
            "caught snowflakes with a mitten",
            "built a snowman beside the igloo",
            "threw a snowball at the penguin",
        ),
    ),
    "castle": Topic(
        names=("knights", "castles"),
        place="castle tower throne dungeon drawbridge moat courtyard fortress",
        thing="sword shield crown helmet lance scepter goblet crossbow",
        person="knight king queen princess prince squire jester wizard",
        creature="dragon griffin stallion falcon",
        scenery="battlements turrets ramparts banners jousts",
        quality="royal noble regal armored gilded",
        move="jousted dueled galloped feasted",
        acts=(
            "raised the sword against the dragon",
            "galloped over the drawbridge",
            "carried the shield of the knight",
            "bowed before the king and the queen",
            "jumped over the moat on a stallion",
        ),
    ),
    "railway": Topic(
        names=("trains", "the railway"),
        place="station platform tunnel depot viaduct junction railyard",
        thing="ticket locomotive suitcase timetable boiler carriage caboose railcar",
        person="engineer conductor passenger stationmaster porter stoker",
        creature="pigeon mole bloodhound",
        scenery="rails tracks wagons locomotives engines",
        quality="sooty steaming rusty clanking speeding",
        move="chugged departed commuted rattled",
        acts=(
            "bought a ticket from the conductor",
            "shoveled coal into the boiler",
            "ran along the platform after the wagons",
            "drove the locomotive through the tunnel",
            "waved at the engineer from the station",
        ),
    ),
}


def content_words(topic: Topic) -> frozenset[str]:
    return frozenset(name.split()[-1] for name in topic.names).union(*map(topic.words, KINDS))


TOPICS: dict[str, frozenset[str]] = {name: content_words(topic) for name, topic in LEXICON.items()}
"""Topic -> its content words, in the only form in which the grammar uses them."""

"""One colour a request: a light tone for decode, a dark one of the same hue for prefill."""

import math

# Golden angle: consecutive requests, which often sit in neighbouring slots, get distant hues.
_HUE_STEP = math.radians(137.508)
_HUE_START = math.radians(25.0)
_DECODE_LIGHTNESS, _DECODE_CHROMA = 0.80, 0.105
_PREFILL_LIGHTNESS, _PREFILL_CHROMA = 0.50, 0.125


def decode_colour(request: int) -> str:
    """Colour of a request's decode steps, as `#rrggbb`; dark text is readable on it."""
    return _oklch(_DECODE_LIGHTNESS, _DECODE_CHROMA, _HUE_START + request * _HUE_STEP)


def prefill_colour(request: int) -> str:
    """Colour of a request's prefill steps, as `#rrggbb`; white text is readable on it."""
    return _oklch(_PREFILL_LIGHTNESS, _PREFILL_CHROMA, _HUE_START + request * _HUE_STEP)


def _oklch(lightness: float, chroma: float, hue: float) -> str:
    """Converts from OKLCH, where equal lightness looks equally light in every hue, to sRGB."""
    a, b = chroma * math.cos(hue), chroma * math.sin(hue)
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )
    return "#" + "".join(f"{_to_byte(channel):02x}" for channel in linear)


def _to_byte(linear: float) -> int:
    clipped = min(max(linear, 0.0), 1.0)
    encoded = 12.92 * clipped if clipped <= 0.0031308 else 1.055 * clipped ** (1 / 2.4) - 0.055
    return round(255 * encoded)

"""What schemathesis sends as an image: random bytes are none, so it draws from real ones."""

import schemathesis
from hypothesis import strategies as st

from mixlab.deploy.serving.body import IMAGE_TYPES
from tests.deploy.uploads import encoded, photo, png

PICTURES = [png(0), png(1, 8, 64), encoded(photo(2), "JPEG"), encoded(photo(3), "GIF")]

schemathesis.openapi.format("binary", st.sampled_from(PICTURES))
for kind in IMAGE_TYPES:
    schemathesis.openapi.media_type(f"image/{kind}", st.sampled_from(PICTURES))

"""The files of a multipart/form-data body, kept in memory and nowhere else."""

import logging

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from mixlab.deploy.serving.limits import Refusal

logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it logs every malformed body

FIELD = "files"
FILE_TYPES = ("image/", "application/octet-stream")


class FilesInMemory:
    """Takes a body piece by piece. Names of files are never looked at: what they say cannot do anything."""

    def __init__(self, boundary: bytes, max_images: int) -> None:
        self.max_images = max_images
        self.files: list[bytearray] = []
        self.ended = False
        self.header_name, self.header_value = bytearray(), bytearray()
        self.headers: dict[bytes, bytes] = {}
        try:
            self.parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self.begin,
                    "on_header_field": lambda data, start, end: self.header_name.extend(data[start:end]),
                    "on_header_value": lambda data, start, end: self.header_value.extend(data[start:end]),
                    "on_header_end": self.end_header,
                    "on_headers_finished": self.check_headers,
                    "on_part_data": lambda data, start, end: self.files[-1].extend(memoryview(data)[start:end]),
                    "on_end": self.end,
                },
            )
        except FormParserError as error:
            raise malformed(error) from error

    def take(self, piece: bytes) -> None:
        try:
            self.parser.write(piece)
        except FormParserError as error:
            raise malformed(error) from error

    def finish(self) -> list[bytes]:
        if not self.ended:
            raise Refusal(400, "The multipart body ends before its last boundary.")
        if not self.files:
            raise Refusal(422, f"The form has no image. Send one or more as {FIELD!r}.")
        return [bytes(file) for file in self.files]

    # -- what the parser calls -------------------------------------------------------------------

    def begin(self) -> None:
        if len(self.files) == self.max_images:
            raise Refusal(413, f"More than {self.max_images} images in one request. Send them in several.")
        self.files.append(bytearray())
        self.headers = {}

    def end_header(self) -> None:
        self.headers[bytes(self.header_name).lower()] = bytes(self.header_value)
        self.header_name.clear()
        self.header_value.clear()

    def check_headers(self) -> None:
        here = len(self.files)
        kind, options = parse_options_header(self.headers.get(b"content-disposition", b""))
        if kind != b"form-data" or b"name" not in options:
            raise Refusal(400, f"Part {here} of the form has no name. Send images as {FIELD!r}.")
        if options[b"name"] != FIELD.encode():
            raise Refusal(422, f"Part {here} of the form is not called {FIELD!r}, the only field there is.")
        said = self.headers.get(b"content-type", FILE_TYPES[-1].encode()).decode("latin-1").strip().lower()
        if not said.startswith(FILE_TYPES):
            raise Refusal(415, f"Part {here} of the form is declared as something else than an image.", image=here)

    def end(self) -> None:
        self.ended = True


def malformed(error: FormParserError) -> Refusal:
    return Refusal(400, f"The multipart body is malformed: {str(error).rstrip('.')}.")

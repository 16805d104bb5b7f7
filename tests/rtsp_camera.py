"""As much of a network camera as a client needs: RTSP, and JPEG over RTP (RFC 2435) within the same connection."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import cv2
import numpy as np
from numpy.typing import NDArray

JPEG, CHANNEL, PIECE, QUALITY = 26, 0, 1200, 90
DESCRIPTION = "v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=camera\r\nt=0 0\r\nm=video 0 RTP/AVP 26\r\na=control:track\r\n"
HEADERS = {
    "OPTIONS": "Public: DESCRIBE, SETUP, PLAY, TEARDOWN\r\n",
    "DESCRIBE": f"Content-Type: application/sdp\r\nContent-Length: {len(DESCRIPTION)}\r\n",
    "SETUP": "Transport: RTP/AVP/TCP;unicast;interleaved=0-1\r\nSession: 1\r\n",
}


class RtspCamera:
    """Shows (H, W, 3) frames in BGR to the first who asks, and hangs up; sides are multiples of 16."""

    def __init__(self, frames: list[NDArray[np.uint8]]) -> None:
        self.frames = frames
        self.server = socket.create_server(("127.0.0.1", 0))
        self.url = f"rtsp://127.0.0.1:{self.server.getsockname()[1]}/camera"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        connection, _ = self.server.accept()
        with self.server, connection, connection.makefile("rb") as lines:
            while request := self._request(lines):
                method = request[0].split()[0]
                number = next(line for line in request if line.lower().startswith("cseq"))
                body = DESCRIPTION if method == "DESCRIBE" else ""
                headers = HEADERS.get(method, "Session: 1\r\n")
                connection.sendall(f"RTSP/1.0 200 OK\r\n{number}\r\n{headers}\r\n{body}".encode())
                if method == "PLAY":
                    for sequence, packet in enumerate(self._packets()):
                        marked = struct.pack(">BBH", 0x80, packet[0], sequence) + packet[1:]
                        connection.sendall(struct.pack(">cBH", b"$", CHANNEL, len(marked)) + marked)
                    return

    def _request(self, lines: Iterator[bytes]) -> list[str]:
        found = []
        for line in lines:
            if not line.strip():
                break
            found.append(line.decode().strip())
        return found

    def _packets(self) -> Iterator[bytes]:
        """What follows the sequence number, behind the type and the mark of a frame's last packet."""
        for number, frame in enumerate(self.frames):
            data = cv2.imencode(".jpg", frame, [cv2.IMWRITE_JPEG_QUALITY, QUALITY])[1].tobytes()
            start = data.index(b"\xff\xda") + 2
            scan = data[start + int.from_bytes(data[start : start + 2], "big") : -2]
            height, width = (side // 8 for side in frame.shape[:2])
            for at in range(0, len(scan), PIECE):
                mark = 0x80 if at + PIECE >= len(scan) else 0
                about = struct.pack(">IIII", 3000 * number, 7, at, 1 << 24 | QUALITY << 16 | width << 8 | height)
                yield bytes([JPEG | mark]) + about + scan[at : at + PIECE]

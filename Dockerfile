# The hub. `docker build -t mergetta .`, then `docker run mergetta --help`; compose.yaml runs all of it.
FROM python:3.12-slim

RUN useradd --system --uid 10001 --create-home mergetta
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir -c constraints.txt '.[hub,postgres,s3,video]' && mkdir /data && chown mergetta /data

USER mergetta
WORKDIR /data
VOLUME /data
EXPOSE 8321
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8321/v1/health', timeout=2)"]
ENTRYPOINT ["mergetta"]
CMD ["hub", "serve", "--folder", "/data", "--host", "0.0.0.0", "--log-level", "info"]

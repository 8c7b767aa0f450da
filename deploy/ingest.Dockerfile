# Brings play from the stream into the store, with Spark. From the project's root:
#   docker build -f deploy/ingest.Dockerfile -t sparring-ingest .
FROM python:3.11-slim-bookworm AS build
COPY requirements/dev.txt /pins.txt
COPY pyproject.toml README.md /src/
COPY src /src/src
RUN python -m venv /app && /app/bin/pip install --no-cache-dir -c /pins.txt "/src[spark,cassandra,aws]"

FROM python:3.11-slim-bookworm
RUN apt-get update && apt-get install -y --no-install-recommends openjdk-17-jre-headless && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --create-home sparring && install -d -o sparring /data
COPY --from=build /app /app
ENV PATH=/app/bin:$PATH
USER 10001
ENTRYPOINT ["sparring", "ingest", "--data", "/data"]

# Takes play in and hands bots out; no learning stack. From the project's root:
#   docker build -f deploy/gateway.Dockerfile -t sparring-gateway .
FROM python:3.11-slim-bookworm AS build
COPY requirements/dev.txt /pins.txt
COPY pyproject.toml README.md /src/
COPY src /src/src
RUN python -m venv /app && /app/bin/pip install --no-cache-dir -c /pins.txt "/src[gateway,cassandra,aws]"

FROM python:3.11-slim-bookworm
RUN useradd --uid 10001 --create-home sparring && install -d -o sparring /data
COPY --from=build /app /app
ENV PATH=/app/bin:$PATH
USER 10001
EXPOSE 8400
ENTRYPOINT ["sparring", "up", "--no-train", "--no-ingest", "--data", "/data", "--host", "0.0.0.0"]

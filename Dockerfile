# protonet serve: docker run -p 8765:8765 -e PROTONET_TOKEN=... -v ./models:/models:ro protonet /models/wine.protonet
FROM python:3.11-slim
WORKDIR /app
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY protonet ./protonet
RUN python -m pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
    --constraint constraints.txt ".[page]" \
    && useradd --system --no-create-home --uid 10001 protonet
USER 10001
ENV OMP_NUM_THREADS=1
EXPOSE 8765
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8765/healthz', timeout=2)"]
ENTRYPOINT ["protonet", "serve", "--host", "0.0.0.0"]

# One image, three services. The compiler makes the decoder's kernels; the demo model is baked in, so
# that a container needs no network.
FROM python:3.11-slim-bookworm

RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /app
COPY requirements-serve.txt ./
RUN python -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir --disable-pip-version-check -r requirements-serve.txt

ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PACELINE_HOME=/opt/paceline \
    PACELINE_RUN_DIR=/run/paceline \
    PACELINE_SHM_DIR=/dev/paceline-shm \
    PACELINE_KERNEL_CACHE=/var/cache/paceline \
    OMP_WAIT_POLICY=passive \
    TOKENIZERS_PARALLELISM=false

COPY common ./common
RUN python -m common.model.catalog smollm2-135m-instruct
COPY paceline ./paceline
COPY services ./services
COPY training ./training
COPY models ./models

RUN useradd --uid 2000 --no-create-home paceline \
    && install -d -m 0700 -o paceline -g paceline /run/paceline /dev/paceline-shm /var/cache/paceline \
    && chmod -R a+rX /opt/paceline
USER 2000:2000

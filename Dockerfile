# docs/containers.md. For CPUs:    docker build -t thinsection .
# For NVIDIA GPUs, with PyPI's build of PyTorch:
#   docker build -t thinsection:cuda --build-arg TORCH_INDEX=https://pypi.org/simple .
FROM python:3.11-slim-bookworm AS wheel
WORKDIR /src
COPY . .
# The build fetches the viewer's OpenSeadragon and checks its hash. Versions are in constraints.txt,
# which hadolint does not read.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir -c constraints.txt hatchling \
    && python -m hatchling build -t wheel

FROM python:3.11-slim-bookworm
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY --from=wheel /src/dist /src/constraints.txt /wheel/
# PyTorch first, as its index has other versions of the packages that it needs
# hadolint ignore=DL3013
RUN pip install --no-cache-dir --no-deps -c /wheel/constraints.txt --index-url "$TORCH_INDEX" torch torchvision \
    && pip install --no-cache-dir -c /wheel/constraints.txt "$(ls /wheel/*.whl)[all]" \
    && rm -r /wheel
# caches for any user: mount a volume there to keep them
ENV XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface \
    MPLCONFIGDIR=/cache/matplotlib \
    NUMBA_CACHE_DIR=/cache/numba
RUN useradd --create-home --uid 1000 thinsection \
    && install --directory --mode 1777 /cache
USER 1000
WORKDIR /data
ENTRYPOINT ["thinsection"]
CMD ["--help"]

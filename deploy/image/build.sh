#!/bin/sh
# Builds the image with buildah and debootstrap on Debian, as root, without docker and without a registry. The base is
# not the official image of Python but one of Debian's own packages, with the same minor version of Python.
#
#     deploy/image/build.sh [OPTIONS OF buildah build]
#
# The options may add what pip needs, such as --volume=/etc/pip.conf:/etc/pip.conf:ro. The image is batchline:VERSION in
# the storage of buildah. `buildah push batchline:VERSION docker-archive:batchline.tar` writes a file that docker loads.
# The list of its Python packages is written to dist/batchline.cdx.json, by `make sbom`.
set -eu
cd "$(dirname "$0")/../.."

VERSION=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' src/batchline/__init__.py)
SUITE=bookworm
BASE=localhost/batchline-base:$SUITE
# Containers of their own would need more rights than a build machine may give.
export BUILDAH_ISOLATION="${BUILDAH_ISOLATION:-chroot}" STORAGE_DRIVER="${STORAGE_DRIVER:-vfs}"

if ! buildah inspect --type image "$BASE" >/dev/null 2>&1; then
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    debootstrap --variant=minbase --include=ca-certificates,python3,python3-pip,python3-venv "$SUITE" "$folder/root"
    ln -s python3 "$folder/root/usr/bin/python"
    # It refuses pip outside of virtual environments, which the official image allows.
    rm -f "$folder"/root/usr/lib/python3*/EXTERNALLY-MANAGED
    rm -rf "$folder"/root/var/cache/apt/archives/*.deb
    container=$(buildah from scratch)
    buildah add --quiet "$container" "$folder/root" / >/dev/null
    buildah commit --quiet --rm "$container" "$BASE" >/dev/null
fi

buildah build --build-arg "PYTHON_IMAGE=$BASE" --format docker --pull=never --tag "batchline:$VERSION" "$@" .
# This machine needs the package index for it, which the image may have got by an option.
make --no-print-directory sbom || echo "The image is complete, but the list of its packages could not be written."

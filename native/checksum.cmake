# Appends the SHA-256 of a library to it, in hexadecimal. The loader of the system ignores what follows the sections;
# ours tells a damaged file by it: the system's would map it, and the process would die in the middle of it.
file(SHA256 ${FILE} checksum)
file(APPEND ${FILE} ${checksum})

// Preloaded into the service: the folder DISK has room for BYTES bytes, as if it were a disk of its own. A real one would have to
// be mounted, which most containers forbid. Files count with their length, so that the file system makes no difference.
#define _GNU_SOURCE
#define _FILE_OFFSET_BITS 64
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

static off_t available(void) {
    off_t bytes = BYTES;
    struct stat file;
    DIR *disk = opendir(DISK);
    for (struct dirent *entry; (entry = readdir(disk));)
        if (!fstatat(dirfd(disk), entry->d_name, &file, 0) && S_ISREG(file.st_mode)) bytes -= file.st_size;
    closedir(disk);
    return bytes > 0 ? bytes : 0;
}

// SQLite writes with no other function. Its temporary files, which have no name, are on another disk.
ssize_t pwrite(int descriptor, const void *bytes, size_t count, off_t position) {
    ssize_t (*real)(int, const void *, size_t, off_t) = dlsym(RTLD_NEXT, "pwrite64");
    struct stat file;
    if (!fstat(descriptor, &file) && file.st_nlink) {
        off_t growth = position + (off_t)count - file.st_size;
        if (growth > 0 && growth > available()) {
            errno = ENOSPC;
            return -1;
        }
    }
    return real(descriptor, bytes, count, position);
}

int statvfs(const char *path, struct statvfs *disk) {
    int (*real)(const char *, struct statvfs *) = dlsym(RTLD_NEXT, "statvfs64");
    int result = real(path, disk);
    disk->f_bavail = available() / disk->f_frsize;
    return result;
}

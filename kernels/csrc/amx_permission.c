/* Linux gives a process the registers of matrix tiles on request only: they are large, and every signal has to save them. */

#define _DEFAULT_SOURCE /* syscall */

#include <errno.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#define REQUEST_PERMISSION 0x1023 /* ARCH_REQ_XCOMP_PERM */
#define TILE_DATA 18

/* For the whole process: 0 if granted, -1 if the library was compiled without the instructions, else an error number. */
int32_t batchrun_allow_amx(void) {
#if defined(BATCHRUN_EMULATE_AMX)
    return 0;
#elif defined(__AMX_TILE__) && defined(__AMX_BF16__)
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) ? errno : 0;
#else
    return -1;
#endif
}

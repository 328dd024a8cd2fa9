// attack: include a file of the machine into the program
// defence: the compiler runs in the sandbox
// expect: fail
// needs: nvcc
// succeeds-at: process
// uses: scale loot

#if __has_include("/etc/passwd")
bool loot = true;
#else
bool loot = false;
#endif

// attack: read a file of the machine in a function that runs when the library is loaded
// defence: the library is loaded in the sandbox
// expect: fail
// needs: nvcc
// succeeds-at: process
// uses: scale loot

bool loot = false;

__attribute__((constructor)) static void steal() {
    FILE* file = fopen("/etc/passwd", "r");
    if (file) loot = fgetc(file) != EOF;
}

from penstock.models.layout import net_shape
from penstock.models.numpy_mlp import NumpyMlp
Policy = NumpyMlp
def make_policy(m, a, info, seed):
    return NumpyMlp(net_shape(m, info.observation_space, info.action_space), a.envs, seed)
